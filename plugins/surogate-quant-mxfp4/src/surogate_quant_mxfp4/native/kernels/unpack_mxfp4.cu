// MXFP4 weights to bf16: an E2M1 code times the power of two of its 32, which is exact in fp32, rounded once.
//
// A thread writes 8 neighbouring values, of 4 rows.

#include "bf16x2.cuh"
#include "experts.cuh"

namespace surogate {

constexpr int threads = 256;
constexpr int vector = 8;
constexpr int rows = 4;

__constant__ const float values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                       -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// E8M0: the exponent of fp32, of which 0 is 2^-127, a subnormal number, and 255 NaN.
__device__ __forceinline__ float power(unsigned code) {
    const unsigned bits = code == 0u ? 0x00400000u : code == 255u ? 0x7fc00000u : code << 23;
    return __uint_as_float(bits);
}

__device__ __forceinline__ unsigned pair(const float *table, unsigned byte, float scale) {
    return bf16x2(__fmul_rn(table[byte & 15u], scale), __fmul_rn(table[(byte >> 4) & 15u], scale));
}

}  // namespace surogate

// codes [O, Q/2], powers [O, Q/32] with Q the inputs up to a multiple of 32 → room [O, I], rows `pitch` apart; of each
// expert, `packed` and `apart` bytes apart
extern "C" __global__ void __launch_bounds__(surogate::threads)
    unpack_mxfp4(const unsigned char *codes, const unsigned char *powers, int padded, unsigned short *room,
                 long long pitch, int outputs, int inputs, long long packed, long long apart) {
    using namespace surogate;
    codes = of_expert(codes, packed);
    powers = of_expert(powers, packed);
    room = of_expert(room, apart);
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
        const long long element = static_cast<long long>(row) * padded + column;
        word[i] = __ldcs(reinterpret_cast<const unsigned *>(codes + element / 2));
        scale[i] = power(__ldg(powers + element / 32));
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        if (first + i >= outputs) return;
        uint4 out;
        out.x = pair(table, word[i], scale[i]);
        out.y = pair(table, word[i] >> 8, scale[i]);
        out.z = pair(table, word[i] >> 16, scale[i]);
        out.w = pair(table, word[i] >> 24, scale[i]);
        *reinterpret_cast<uint4 *>(room + (first + i) * pitch + column) = out;
    }
}
