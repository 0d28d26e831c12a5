// What an adapted FP8 projection makes of its input, from one reading: codes, the largest absolute value, and LoRA's
// u = x Aᵀ of rank 16 for each projection. The input is a bf16 matrix, or silu(gate) · up of two.
//
// A block has 32 tokens and all features, a warp every 16th group of 32 features. A thread holds 8 features in a row of
// four tokens: an operand of mma.m16n8k16 in an order of features that the other operand follows. Sums over warps go
// through shared memory in the order of the warps: equal inputs give equal bits.

#include "codes.cuh"
#include "skinny.cuh"

namespace surogate {

constexpr int warps = 16, threads = 32 * warps, tokens = 32, group = 32;

// The input as it is. `at` are the 8 features of a row that a thread reads next, `Raw` is what it has asked for of them.
struct Plain {
    using Raw = uint4;
    const u16 *at;
    long long row;
    __device__ __forceinline__ void move(long long rows, int columns) { at += rows * row + columns; }
    __device__ __forceinline__ Raw load(int below) const {
        return __ldg(reinterpret_cast<const uint4 *>(at + below * row));
    }
    __device__ __forceinline__ static void values(const Raw &raw, u32 (&x)[4]) {
        x[0] = raw.x, x[1] = raw.y, x[2] = raw.z, x[3] = raw.w;
    }
};

__device__ __forceinline__ float gated(float g, float u) { return __fdividef(g, 1.0f + __expf(-g)) * u; }

struct Gated {
    struct Raw {
        uint4 gate, up;
    };
    const u16 *gate;
    long long gate_row;
    const u16 *up;
    long long up_row;
    __device__ __forceinline__ void move(long long rows, int columns) {
        gate += rows * gate_row + columns;
        up += rows * up_row + columns;
    }
    __device__ __forceinline__ Raw load(int below) const {
        return {__ldg(reinterpret_cast<const uint4 *>(gate + below * gate_row)),
                __ldg(reinterpret_cast<const uint4 *>(up + below * up_row))};
    }
    __device__ __forceinline__ static void values(const Raw &raw, u32 (&x)[4]) {
        const u32 gates[4] = {raw.gate.x, raw.gate.y, raw.gate.z, raw.gate.w};
        const u32 ups[4] = {raw.up.x, raw.up.y, raw.up.z, raw.up.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            x[i] = bf16x2(gated(low_of(gates[i]), low_of(ups[i])), gated(high_of(gates[i]), high_of(ups[i])));
    }
};

template <int slots, typename Source>
__device__ __forceinline__ void encode(Source source, const u16 *a, float *figures, unsigned char *codes,
                                       u16 *u, int features) {
    extern __shared__ float sums[];  // [warps, tokens, ranks + 1]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long first = blockIdx.x * tokens;
    const float scale = __ldg(figures);
    float d[slots][2][2][4] = {};
    u32 most = 0;
    constexpr int stride = warps * group;
    static_assert(stride % tile_columns == 0, "so that codes lie whole tiles apart");
    typename Source::Raw raw[4];
    const auto load = [&] {
#pragma unroll
        for (int r = 0; r < 4; ++r) raw[r] = source.load(8 * r);
    };
    int column = warp * group + lane % 4 * 8;
    source.move(first + lane / 4, column);
    const u16 *a_at = a + static_cast<long long>(lane / 4) * features + column;
    codes += place_of(first + lane / 4, column, features);
    if (column < features) load();
    for (; column < features; column += stride) {
        uint4 right[slots][2];
#pragma unroll
        for (int s = 0; s < slots; ++s) {
#pragma unroll
            for (int n = 0; n < 2; ++n)
                right[s][n] = __ldg(reinterpret_cast<const uint4 *>(a_at + static_cast<long long>(s * ranks + n * 8) * features));
        }
        u32 x[4][4];
#pragma unroll
        for (int r = 0; r < 4; ++r) Source::values(raw[r], x[r]);
        source.move(0, stride);
        if (column + stride < features) load();
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
            for (int i = 0; i < 4; ++i) most = larger(most, x[r][i]);
            *reinterpret_cast<uint2 *>(codes + r * 8 * tile_columns) = codes_of<false>(x[r], scale);
        }
        a_at += stride;
        codes += stride * tile_rows;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const u32 left[4] = {x[2 * m][0], x[2 * m + 1][0], x[2 * m][1], x[2 * m + 1][1]};
            const u32 next[4] = {x[2 * m][2], x[2 * m + 1][2], x[2 * m][3], x[2 * m + 1][3]};
#pragma unroll
            for (int s = 0; s < slots; ++s) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    multiply_add(d[s][m][n], left, right[s][n].x, right[s][n].y);
                    multiply_add(d[s][m][n], next, right[s][n].z, right[s][n].w);
                }
            }
        }
    }
    enter_largest(most, figures);
    constexpr int pitch = ranks + 1;
#pragma unroll
    for (int s = 0; s < slots; ++s) {
        if (s > 0) __syncthreads();
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = m * 16 + lane / 4 + i / 2 * 8, rank = n * 8 + lane % 4 * 2 + i % 2;
                    sums[(warp * tokens + row) * pitch + rank] = d[s][m][n][i];
                }
            }
        }
        __syncthreads();
        const int row = threadIdx.x / ranks, rank = threadIdx.x % ranks;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < warps; ++w) total += sums[(w * tokens + row) * pitch + rank];
        u[(first + row) * (slots * ranks) + s * ranks + rank] = static_cast<u16>(bf16x2(total, 0.0f));
    }
}

}  // namespace surogate

#define ENCODE(slots)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(surogate::threads)                                                    \
        encode_##slots(const surogate::u16 *x, long long x_row, const surogate::u16 *a, float *figures,                \
                       unsigned char *codes, surogate::u16 *u, int features) {                                         \
        surogate::encode<slots>(surogate::Plain{x, x_row}, a, figures, codes, u, features);                            \
    }

ENCODE(1)
ENCODE(2)
ENCODE(3)

extern "C" __global__ void __launch_bounds__(surogate::threads)
    encode_gated(const surogate::u16 *gate, long long gate_row, const surogate::u16 *up, long long up_row,
                 const surogate::u16 *a, float *figures, unsigned char *codes, surogate::u16 *u, int features) {
    surogate::encode<1>(surogate::Gated{gate, gate_row, up, up_row}, a, figures, codes, u, features);
}

// The figures of silu(gate) · up before its codes are made, by one block; see `begin` of quantise.cu.
extern "C" __global__ void __launch_bounds__(1024)
    encode_gated_begin(const surogate::u16 *gate, long long gate_row, const surogate::u16 *up, long long up_row, int rows,
                       const float *row, float limit, float factor, float *figures, int features) {
    using namespace surogate;
    __shared__ u32 most;
    if (row[0] > 0.0f) {
        if (threadIdx.x == 0) begin_figures(row[0], 0.0f, limit, factor, figures);
        return;
    }
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    const int chunks = features / 8;
    u32 pairs = 0;
    for (long long i = threadIdx.x; i < static_cast<long long>(rows) * chunks; i += 1024) {
        Gated source{gate, gate_row, up, up_row};
        source.move(i / chunks, i % chunks * 8);
        u32 x[4];
        Gated::values(source.load(0), x);
        pairs = larger(larger(larger(larger(pairs, x[0]), x[1]), x[2]), x[3]);
    }
    const u32 above = pairs & 0xffff0000u, below = pairs << 16;
    atomicMax(&most, __reduce_max_sync(~0u, above > below ? above : below));
    __syncthreads();
    if (threadIdx.x == 0) begin_figures(0.0f, __uint_as_float(most), limit, factor, figures);
}
