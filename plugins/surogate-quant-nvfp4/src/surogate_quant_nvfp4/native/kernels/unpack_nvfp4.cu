// NVFP4 weights to bf16: an E2M1 code times the E4M3 scale of its 16 (exact in fp32), times the weight's own, rounded once.
//
// A thread writes 8 neighbouring values, of 4 rows.

#include "bf16x2.cuh"
#include "e4m3.cuh"
#include "experts.cuh"

namespace surogate {

constexpr int threads = 256;
constexpr int vector = 8;
constexpr int rows = 4;

__constant__ const float values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                       -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

__device__ __forceinline__ unsigned pair(const float *table, unsigned byte, float scale, float decode) {
    const float lower = __fmul_rn(__fmul_rn(table[byte & 15u], scale), decode);
    const float upper = __fmul_rn(__fmul_rn(table[(byte >> 4) & 15u], scale), decode);
    return bf16x2(lower, upper);
}

}  // namespace surogate

// codes [O, Q/2], scales [O, Q/16] with Q the inputs up to a multiple of 16, decode [1] → room [O, I], rows `pitch`
// apart; of each expert, `packed` and `apart` bytes apart
extern "C" __global__ void __launch_bounds__(surogate::threads)
    unpack_nvfp4(const unsigned char *codes, const unsigned char *scales, const float *decode, int padded,
                 unsigned short *room, long long pitch, int outputs, int inputs, long long packed,
                 long long apart) {
    using namespace surogate;
    codes = of_expert(codes, packed);
    scales = of_expert(scales, packed);
    decode = of_expert(decode, packed);
    room = of_expert(room, apart);
    // 16 words in 16 banks: lanes that read at once meet in none unless they read the same word.
    __shared__ float table[16];
    if (threadIdx.x < 16) table[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    const int column = (blockIdx.x * threads + threadIdx.x) * vector;
    if (column >= inputs) return;
    const int first = blockIdx.y * rows;
    const float factor = __ldg(decode);
    unsigned word[rows];
    float scale[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        const int row = first + i < outputs ? first + i : outputs - 1;
        const long long element = static_cast<long long>(row) * padded + column;
        word[i] = __ldcs(reinterpret_cast<const unsigned *>(codes + element / 2));
        scale[i] = e4m3(__ldg(scales + element / 16));
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        if (first + i >= outputs) return;
        uint4 out;
        out.x = pair(table, word[i], scale[i], factor);
        out.y = pair(table, word[i] >> 8, scale[i], factor);
        out.z = pair(table, word[i] >> 16, scale[i], factor);
        out.w = pair(table, word[i] >> 24, scale[i], factor);
        *reinterpret_cast<uint4 *>(room + (first + i) * pitch + column) = out;
    }
}
