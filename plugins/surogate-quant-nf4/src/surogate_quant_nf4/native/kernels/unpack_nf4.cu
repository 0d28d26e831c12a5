// NF4 weights (arXiv 2305.14314) to bf16: code's value times its block's absmax in fp32, rounded once.
//
// A thread writes 8 neighbouring values, of 4 rows. A block is at least 64 long, so 8 values that begin at a
// multiple of 8 share one absmax; the products are rounded as they stand, so the bits are the reference's.

#include "bf16x2.cuh"
#include "experts.cuh"

namespace surogate {

constexpr int threads = 256;
constexpr int vector = 8;
constexpr int rows = 4;

__constant__ const float values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f,
    1.0f};

struct Plain {
    const float *absmax;
    __device__ __forceinline__ float at(long long block) const { return __ldg(absmax + block); }
};

// absmax as codes of a map, in groups of 256 with an absmax each, less a common offset
struct Nested {
    const unsigned char *codes;
    const float *group_absmax, *offset, *map;
    __device__ __forceinline__ float at(long long block) const {
        const float product = __fmul_rn(__ldg(map + __ldg(codes + block)), __ldg(group_absmax + (block >> 8)));
        return __fadd_rn(product, __ldg(offset));
    }
};

__device__ __forceinline__ unsigned pair(const float *table, unsigned byte, float absmax) {
    return bf16x2(__fmul_rn(table[byte >> 4], absmax), __fmul_rn(table[byte & 15], absmax));
}

template <typename Absmax>
__device__ __forceinline__ void unpack(const unsigned char *codes, Absmax absmax, int log_block, unsigned short *room,
                                       long long pitch, int outputs, int inputs) {
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
        const long long element = static_cast<long long>(row) * inputs + column;
        word[i] = __ldcs(reinterpret_cast<const unsigned *>(codes + element / 2));
        scale[i] = absmax.at(element >> log_block);
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        if (first + i >= outputs) return;
        uint4 out;
        out.x = pair(table, word[i] & 255u, scale[i]);
        out.y = pair(table, (word[i] >> 8) & 255u, scale[i]);
        out.z = pair(table, (word[i] >> 16) & 255u, scale[i]);
        out.w = pair(table, word[i] >> 24, scale[i]);
        *reinterpret_cast<uint4 *>(room + (first + i) * pitch + column) = out;
    }
}

}  // namespace surogate

// codes [O·I/2], absmax [B] → room [O, I] with rows `pitch` apart; of each expert, `packed` and `apart` bytes apart
extern "C" __global__ void __launch_bounds__(surogate::threads)
    unpack_nf4(const unsigned char *codes, const float *absmax, int log_block, unsigned short *room, long long pitch,
               int outputs, int inputs, long long packed, long long apart) {
    using namespace surogate;
    unpack(of_expert(codes, packed), Plain{of_expert(absmax, packed)}, log_block, of_expert(room, apart), pitch, outputs,
           inputs);
}

extern "C" __global__ void __launch_bounds__(surogate::threads)
    unpack_nf4_nested(const unsigned char *codes, const unsigned char *absmax_codes, const float *group_absmax,
                      const float *offset, const float *map, int log_block, unsigned short *room, long long pitch,
                      int outputs, int inputs, long long packed, long long apart) {
    using namespace surogate;
    const Nested absmax{of_expert(absmax_codes, packed), of_expert(group_absmax, packed), of_expert(offset, packed), map};
    unpack(of_expert(codes, packed), absmax, log_block, of_expert(room, apart), pitch, outputs, inputs);
}
