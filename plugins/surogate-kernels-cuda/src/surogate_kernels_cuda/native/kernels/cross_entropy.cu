// Cross-entropy of logits [N, V] against labels [N]: the loss and the log-sum-exp in one pass over the
// logits, the gradient in a second one that may write where it reads.
//
// One block a row. Each thread keeps a running maximum and a running sum scaled to it (Milakov and
// Gimelshein, arXiv 1805.02867); they are combined in a fixed order, so equal inputs give equal bits.

#include "vector.cuh"

namespace surogate {

constexpr int threads = 512;
constexpr int warps = threads / 32;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

struct Running {
    float maximum, sum;
};

__device__ __forceinline__ Running joined(Running a, Running b) {
    // fmaxf drops a NaN; the sum carries it.
    const float maximum = fmaxf(a.maximum, b.maximum);
    const float base = maximum == minus_infinity() ? 0.0f : maximum;
    return {maximum, a.sum * __expf(a.maximum - base) + b.sum * __expf(b.maximum - base)};
}

// One rescaling for all of `values`: the sum is a chain, and an exponential an element is what the chip has time for.
template <int count> __device__ __forceinline__ void take(Running &running, const float (&values)[count]) {
    float maximum = running.maximum;
#pragma unroll
    for (int i = 0; i < count; ++i) maximum = fmaxf(maximum, values[i]);
    // Subtracting -inf from -inf would make a NaN where nothing was seen yet.
    const float base = maximum == minus_infinity() ? 0.0f : maximum;
    float sum = running.sum * __expf(running.maximum - base);
#pragma unroll
    for (int i = 0; i < count; ++i) sum += __expf(values[i] - base);
    running = {maximum, sum};
}

template <typename T> __device__ __forceinline__ void take(Running &running, const Vector<T> &vector) {
    float values[Vector<T>::width];
#pragma unroll
    for (int i = 0; i < Vector<T>::width; ++i) values[i] = wide(vector.values[i]);
    take(running, values);
}

template <typename T> __device__ __forceinline__ void take_one(Running &running, T x) {
    const float values[1] = {wide(x)};
    take(running, values);
}

template <typename T>
__device__ void loss(const T *logits_NV, long long stride, const long long *labels_N, long long ignored, int columns,
                     float *loss_N, float *lse_N) {
    using Wide = Vector<T>;
    const long long row_number = blockIdx.x;
    const T *row = logits_NV + row_number * stride;
    Running running{minus_infinity(), 0.0f};
    const int head = unaligned(row, columns);
    for (int i = threadIdx.x; i < head; i += threads) take_one(running, row[i]);
    const int vectors = (columns - head) / Wide::width;
    const Wide *body = reinterpret_cast<const Wide *>(row + head);
    for (int i = threadIdx.x; i < vectors; i += threads) take(running, body[i]);
    for (int i = head + vectors * Wide::width + threadIdx.x; i < columns; i += threads) take_one(running, row[i]);

    __shared__ Running partial[warps];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const Running other{__shfl_xor_sync(~0u, running.maximum, offset), __shfl_xor_sync(~0u, running.sum, offset)};
        running = joined(running, other);
    }
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = running;
    __syncthreads();
    if (threadIdx.x == 0) {
        running = partial[0];
        for (int i = 1; i < warps; ++i) running = joined(running, partial[i]);
        const float lse = running.maximum + logf(running.sum);
        const long long label = labels_N[row_number];
        lse_N[row_number] = lse;
        loss_N[row_number] = label == ignored ? 0.0f : lse - wide(row[label]);
    }
}

// dlogits may be logits.
template <typename T>
__device__ void gradient(const float *dloss_N, const T *logits_NV, long long stride, const long long *labels_N,
                         long long ignored, const float *lse_N, int columns, T *dlogits_NV, long long out_stride) {
    using Wide = Vector<T>;
    const long long row_number = blockIdx.x;
    const T *row = logits_NV + row_number * stride;
    T *out = dlogits_NV + row_number * out_stride;
    const long long label = labels_N[row_number];
    const bool trained = label != ignored;
    const float factor = trained ? dloss_N[row_number] : 0.0f;
    const float lse = lse_N[row_number];
    const auto value = [&](float x, int column) {
        // An untrained row is zero, whatever its logits are.
        return trained ? (__expf(x - lse) - (column == label ? 1.0f : 0.0f)) * factor : 0.0f;
    };
    const int head = unaligned(row, columns);
    const bool together = unaligned(out, columns) == head;
    if (!together) {
        for (int i = threadIdx.x; i < columns; i += threads) out[i] = narrow<T>(value(wide(row[i]), i));
        return;
    }
    for (int i = threadIdx.x; i < head; i += threads) out[i] = narrow<T>(value(wide(row[i]), i));
    const int vectors = (columns - head) / Wide::width;
    const Wide *body = reinterpret_cast<const Wide *>(row + head);
    Wide *out_body = reinterpret_cast<Wide *>(out + head);
    for (int i = threadIdx.x; i < vectors; i += threads) {
        Wide vector = body[i];
#pragma unroll
        for (int j = 0; j < Wide::width; ++j)
            vector.values[j] = narrow<T>(value(wide(vector.values[j]), head + i * Wide::width + j));
        out_body[i] = vector;
    }
    for (int i = head + vectors * Wide::width + threadIdx.x; i < columns; i += threads)
        out[i] = narrow<T>(value(wide(row[i]), i));
}

}  // namespace surogate

#define CROSS_ENTROPY(T, name)                                                                                         \
    extern "C" __global__ void __launch_bounds__(surogate::threads) cross_entropy_loss_##name(                         \
        const T *logits_NV, long long stride, const long long *labels_N, long long ignored, int columns,               \
        float *loss_N, float *lse_N) {                                                                                 \
        surogate::loss(logits_NV, stride, labels_N, ignored, columns, loss_N, lse_N);                                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(surogate::threads) cross_entropy_gradient_##name(                     \
        const float *dloss_N, const T *logits_NV, long long stride, const long long *labels_N, long long ignored,      \
        const float *lse_N, int columns, T *dlogits_NV, long long out_stride) {                                        \
        surogate::gradient(dloss_N, logits_NV, stride, labels_N, ignored, lse_N, columns, dlogits_NV, out_stride);     \
    }

CROSS_ENTROPY(float, float32)
CROSS_ENTROPY(__nv_bfloat16, bfloat16)
CROSS_ENTROPY(__half, float16)
