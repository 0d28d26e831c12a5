// SwiGLU's backward with the skinny products around it, as FP8: e5m2 codes of dgate and dup side by side, in the tiles of
// codes.cuh, and their largest absolute values.

#include "codes.cuh"
#include "gated.cuh"

namespace surogate {

// Each half has figures of its own.
struct Codes {
    unsigned char *codes;
    float *figures;
    float gate_scale, up_scale;
    u32 most_gate, most_up;
    u32 at, up, over;  // bytes
    __device__ __forceinline__ void begin(int row, int column, int features) {
        at = static_cast<u32>(place_of(row, column, 2 * features));
        up = features * tile_rows;
        over = (2 * features - tile_columns) * tile_rows;
    }
    __device__ __forceinline__ void store(int r, const u32 (&dgate)[4], const u32 (&dup)[4], bool inside) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            most_gate = larger(most_gate, dgate[i]);
            most_up = larger(most_up, dup[i]);
        }
        if (inside) {
            unsigned char *to = codes + at + r * 8 * tile_columns;
            *reinterpret_cast<uint2 *>(to) = codes_of<true>(dgate, gate_scale);
            *reinterpret_cast<uint2 *>(to + up) = codes_of<true>(dup, up_scale);
        }
    }
    // 16 rows on. Tiles begin at multiples of 16 KiB.
    __device__ __forceinline__ void next() {
        at += step * tile_columns;
        if (at % (tile_rows * tile_columns) < step * tile_columns) at += over;
    }
    __device__ __forceinline__ void finish() {
        enter_largest(most_gate, figures);
        enter_largest(most_up, figures + figures_of_one);
    }
};

}  // namespace surogate

extern "C" __global__ void __launch_bounds__(surogate::threads, 2)
    gated_codes(unsigned char *codes, float *figures, SUROGATE_GATED_ARGUMENTS) {
    using namespace surogate;
    Codes out{codes, figures, __ldg(figures), __ldg(figures + figures_of_one), 0, 0};
    gated<2>(SUROGATE_GATED_OF, out);
    out.finish();
}

// The figures of dgate and dup before their codes are made: a block each. Only before there are scales they are computed
// to find the largest: that is one step of a run.
extern "C" __global__ void __launch_bounds__(1024)
    gated_codes_begin(const surogate::u16 *dh, long long dh_row, const surogate::u16 *gate, long long gate_row,
                const surogate::u16 *up, long long up_row, const float *r0, const float *r1, float limit, float factor,
                float *figures, int tokens, int features) {
    using namespace surogate;
    __shared__ u32 most;
    const bool second = blockIdx.x == 1;
    const float scale = (second ? r1 : r0)[2];
    float *own = figures + figures_of_one * blockIdx.x;
    if (scale > 0.0f) {
        if (threadIdx.x == 0) begin_figures(scale, 0.0f, limit, factor, own);
        return;
    }
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    u32 pairs = 0;
    for (long long i = threadIdx.x; i < static_cast<long long>(tokens) * (features / 2); i += 1024) {
        const long long row = i / (features / 2), column = i % (features / 2) * 2;
        const u32 gates = *reinterpret_cast<const u32 *>(gate + row * gate_row + column);
        const u32 ups = *reinterpret_cast<const u32 *>(up + row * up_row + column);
        const u32 dhs = *reinterpret_cast<const u32 *>(dh + row * dh_row + column);
        float made[3][2];
        gradients_of(low_of(gates), low_of(ups), low_of(dhs), made, 0);
        gradients_of(high_of(gates), high_of(ups), high_of(dhs), made, 1);
        pairs = larger(pairs, bf16x2(second ? made[1][0] : made[0][0], second ? made[1][1] : made[0][1]));
    }
    const u32 above = pairs & 0xffff0000u, below = pairs << 16;
    atomicMax(&most, __reduce_max_sync(~0u, above > below ? above : below));
    __syncthreads();
    if (threadIdx.x == 0) begin_figures(0.0f, __uint_as_float(most), limit, factor, own);
}
