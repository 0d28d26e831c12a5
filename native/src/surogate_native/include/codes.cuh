// FP8 codes and the tiles that they lie in: 128 rows by 128 of the inner dimension, 16 KiB together, whose 16-byte chunk
// c of row r stands at c ^ (r % 8), the order in which wgmma reads them.
//
// Figures of a tensor, 16 bytes: its scale, 1 / scale, the bits of its largest absolute value, 0.
#pragma once
#include "bf16x2.cuh"

namespace surogate {

constexpr int tile_rows = 128, tile_columns = 128;
[[maybe_unused]] constexpr int figures_of_one = 4;

// Two values times the scale as codes, saturated and rounded to nearest, ties to even.
template <bool gradient> __device__ __forceinline__ unsigned codes_of(float low, float high) {
    unsigned short both = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890  // older ones are refused before
    if constexpr (gradient)
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
#endif
    return both;
}

// Eight bf16 values as codes.
template <bool gradient> __device__ __forceinline__ uint2 codes_of(const unsigned (&x)[4], float scale) {
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = codes_of<gradient>(low_of(x[i]) * scale, high_of(x[i]) * scale);
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Where the codes of eight columns from `column` on stand, in a matrix of `columns` columns.
__device__ __forceinline__ long long place_of(long long row, int column, int columns) {
    const long long tile = row / tile_rows * (columns / tile_columns) + column / tile_columns;
    const int chunk = column % tile_columns / 16 ^ static_cast<int>(row % 8);
    return (tile * tile_rows + row % tile_rows) * tile_columns + chunk * 16 + column % 16;
}

// The larger absolute values of two pairs of bf16, as bits: they are in the order of unsigned integers, NaN last.
__device__ __forceinline__ unsigned larger(unsigned most, unsigned x) { return __vmaxu2(most, x & 0x7fff7fffu); }

// The largest of all threads' pairs into `figures`; every warp of the block calls it.
__device__ __forceinline__ void enter_largest(unsigned pairs, float *figures) {
    const unsigned most = __reduce_max_sync(~0u, pairs << 16 > (pairs & 0xffff0000u) ? pairs << 16 : pairs & 0xffff0000u);
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<unsigned *>(figures) + 2, most);
}

// A tensor's figures before its codes are made: the scale of `row`, or that of its own largest value where there is none.
__device__ __forceinline__ void begin_figures(float scale, float largest, float limit, float factor, float *figures) {
    if (!(scale > 0.0f)) {
        scale = 1.0f;
        if (largest > 0.0f && largest <= 3.402823466e+38f) scale = fminf(limit / largest * factor, 3.402823466e+38f);
    }
    figures[0] = scale;
    figures[1] = 1.0f / scale;
    figures[2] = 0.0f;
    figures[3] = 0.0f;
}

}  // namespace surogate
