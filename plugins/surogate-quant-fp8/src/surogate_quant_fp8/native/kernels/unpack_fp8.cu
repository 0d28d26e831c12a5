// FP8 weights to bf16: an E4M3 code times the fp32 scale of its square block, in fp32, rounded once.
//
// A thread writes 8 neighbouring values, of 4 rows. A block's side is a multiple of 8, so they share one scale.

#include "bf16x2.cuh"
#include "e4m3.cuh"
#include "experts.cuh"

namespace surogate {

constexpr int threads = 256;
constexpr int vector = 8;
constexpr int rows = 4;

__device__ __forceinline__ unsigned pair(unsigned codes, float scale) {
    return bf16x2(__fmul_rn(e4m3(codes & 255u), scale), __fmul_rn(e4m3((codes >> 8) & 255u), scale));
}

}  // namespace surogate

// codes [O, I], scales [P, Q] → room [O, I] with rows `pitch` apart; of each expert, `packed` and `apart` bytes apart
extern "C" __global__ void __launch_bounds__(surogate::threads)
    unpack_fp8(const unsigned char *codes, const float *scales, int log_block, int blocks, unsigned short *room,
               long long pitch, int outputs, int inputs, long long packed, long long apart) {
    using namespace surogate;
    codes = of_expert(codes, packed);
    scales = of_expert(scales, packed);
    room = of_expert(room, apart);
    const int column = (blockIdx.x * threads + threadIdx.x) * vector;
    if (column >= inputs) return;
    const int first = blockIdx.y * rows;
    uint2 word[rows];
    float scale[rows];
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        const int row = first + i < outputs ? first + i : outputs - 1;
        word[i] = __ldcs(reinterpret_cast<const uint2 *>(codes + static_cast<long long>(row) * inputs + column));
        scale[i] = __ldg(scales + static_cast<long long>(row >> log_block) * blocks + (column >> log_block));
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        if (first + i >= outputs) return;
        uint4 out;
        out.x = pair(word[i].x, scale[i]);
        out.y = pair(word[i].x >> 16, scale[i]);
        out.z = pair(word[i].y, scale[i]);
        out.w = pair(word[i].y >> 16, scale[i]);
        *reinterpret_cast<uint4 *>(room + (first + i) * pitch + column) = out;
    }
}
