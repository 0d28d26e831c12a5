// A bf16 matrix as FP8 codes in tiles, and its largest absolute value, from one reading; ranges of columns are tensors
// with scales of their own. The rule is `surogate_core.kernels.scaled`'s.

#include "codes.cuh"

namespace surogate {

struct Ranges {
    int ends[4];
    __device__ __forceinline__ int of(int column) const {
        return (column >= ends[0]) + (column >= ends[1]) + (column >= ends[2]);
    }
};

constexpr int side = 128;                   // of a block's rows and columns
constexpr int lanes = side / 8;             // that have a row of them
constexpr int threads = 256;
constexpr int passes = side / (threads / lanes);

template <bool gradient>
__device__ void quantise(const unsigned short *x, long long x_row, float *figures, unsigned char *codes, int rows,
                         const Ranges &ranges) {
    const int columns = gridDim.x * side, column = blockIdx.x * side + threadIdx.x % lanes * 8;
    float *own = figures + figures_of_one * ranges.of(blockIdx.x * side);
    const float scale = own[0];
    const long long first = blockIdx.y * side + threadIdx.x / lanes;
    uint4 values[passes];
#pragma unroll
    for (int i = 0; i < passes; ++i) {
        const long long row = first + i * (threads / lanes);
        values[i] = __ldg(reinterpret_cast<const uint4 *>(x + row * x_row + column));
    }
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < passes; ++i) {
        const unsigned pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) most = larger(most, pairs[j]);
        const long long row = first + i * (threads / lanes);
        *reinterpret_cast<uint2 *>(codes + place_of(row, column, columns)) = codes_of<gradient>(pairs, scale);
    }
    enter_largest(most, own);
}

}  // namespace surogate

// A block a range. Only before there are scales it reads the matrix: that is one step of a run.
extern "C" __global__ void __launch_bounds__(1024)
    begin(const unsigned short *x, long long x_row, int rows, const float *r0, const float *r1, const float *r2,
          const float *r3, int role, int e0, int e1, int e2, int e3, float limit, float factor, float *figures) {
    using namespace surogate;
    __shared__ unsigned most;
    const int slot = blockIdx.x;
    const float *row = slot == 0 ? r0 : slot == 1 ? r1 : slot == 2 ? r2 : r3;
    const float scale = row[role];
    float *own = figures + figures_of_one * slot;
    if (scale > 0.0f) {
        if (threadIdx.x == 0) begin_figures(scale, 0.0f, limit, factor, own);
        return;
    }
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    const int from = slot == 0 ? 0 : slot == 1 ? e0 : slot == 2 ? e1 : e2;
    const int chunks = ((slot == 0 ? e0 : slot == 1 ? e1 : slot == 2 ? e2 : e3) - from) / 8;
    unsigned pairs = 0;
    for (long long i = threadIdx.x; i < static_cast<long long>(rows) * chunks; i += 1024) {
        const uint4 v = __ldg(reinterpret_cast<const uint4 *>(x + i / chunks * x_row + from + i % chunks * 8));
        pairs = larger(larger(larger(larger(pairs, v.x), v.y), v.z), v.w);
    }
    const unsigned high = pairs & 0xffff0000u, low = pairs << 16;
    atomicMax(&most, __reduce_max_sync(~0u, high > low ? high : low));
    __syncthreads();
    if (threadIdx.x == 0) begin_figures(0.0f, __uint_as_float(most), limit, factor, own);
}

#define QUANTISE(name, gradient)                                                                                       \
    extern "C" __global__ void __launch_bounds__(surogate::threads)                                                    \
        name(const unsigned short *x, long long x_row, float *figures, unsigned char *codes, int rows, int e0, int e1, \
             int e2, int e3) {                                                                                         \
        surogate::quantise<gradient>(x, x_row, figures, codes, rows, surogate::Ranges{{e0, e1, e2, e3}});              \
    }

QUANTISE(quantise_e4m3, false)
QUANTISE(quantise_e5m2, true)
