// Weights of 4-bit codes to bf16: a thread writes 8 neighbouring values, of 4 rows.
#pragma once

#include "bf16x2.cuh"
#include "experts.cuh"

namespace surogate {

constexpr int threads = 256;
constexpr int vector = 8;
constexpr int rows = 4;

// codes [O, columns/2] → room [O, I] with rows `pitch` apart. `Scales` has the scale of an element's block, `at`, and
// the product of a byte's two values with it, rounded once, `pair`. 8 values that begin at a multiple of 8 share a block.
template <typename Scales>
__device__ __forceinline__ void unpack_four_bits(const float *values, const unsigned char *codes, const Scales scales,
                                                 int columns, unsigned short *room, long long pitch, int outputs,
                                                 int inputs) {
    // 16 words in 16 banks: lanes that read at once meet in none unless they read the same word.
    __shared__ float table[16];
    if (threadIdx.x < 16) table[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    const int column = (blockIdx.x * threads + threadIdx.x) * vector;
    if (column >= inputs) return;
    const int first = blockIdx.y * rows;
    unsigned word[rows];
    float scale[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        const int row = first + i < outputs ? first + i : outputs - 1;
        const long long element = static_cast<long long>(row) * columns + column;
        word[i] = __ldcs(reinterpret_cast<const unsigned *>(codes + element / 2));
        scale[i] = scales.at(element);
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        if (first + i >= outputs) return;
        uint4 out;
        out.x = scales.pair(table, word[i] & 255u, scale[i]);
        out.y = scales.pair(table, (word[i] >> 8) & 255u, scale[i]);
        out.z = scales.pair(table, (word[i] >> 16) & 255u, scale[i]);
        out.w = scales.pair(table, word[i] >> 24, scale[i]);
        *reinterpret_cast<uint4 *>(room + (first + i) * pitch + column) = out;
    }
}

}  // namespace surogate
