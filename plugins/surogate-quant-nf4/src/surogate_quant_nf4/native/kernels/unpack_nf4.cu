// NF4 weights (arXiv 2305.14314) to bf16: code's value times its block's absmax in fp32, rounded once.
//
// A block is at least 64 long; the products are rounded as they stand, so the bits are the reference's.

#include "four_bits.cuh"

namespace surogate {

__constant__ const float values[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f,
    1.0f};

// The first of two codes is in the upper half of a byte.
struct Blocks {
    int log_block;
    __device__ __forceinline__ unsigned pair(const float *table, unsigned byte, float absmax) const {
        return bf16x2(__fmul_rn(table[byte >> 4], absmax), __fmul_rn(table[byte & 15u], absmax));
    }
};

struct Plain : Blocks {
    const float *absmax;
    __device__ __forceinline__ Plain(int log_block, const float *absmax) : Blocks{log_block}, absmax(absmax) {}
    __device__ __forceinline__ float at(long long element) const { return __ldg(absmax + (element >> log_block)); }
};

// absmax as codes of a map, in groups of 256 with an absmax each, less a common offset
struct Nested : Blocks {
    const unsigned char *codes;
    const float *group_absmax, *offset, *map;
    __device__ __forceinline__ Nested(int log_block, const unsigned char *codes, const float *group_absmax,
                                      const float *offset, const float *map)
        : Blocks{log_block}, codes(codes), group_absmax(group_absmax), offset(offset), map(map) {}
    __device__ __forceinline__ float at(long long element) const {
        const long long block = element >> log_block;
        const float product = __fmul_rn(__ldg(map + __ldg(codes + block)), __ldg(group_absmax + (block >> 8)));
        return __fadd_rn(product, __ldg(offset));
    }
};

}  // namespace surogate

// codes [O·I/2], absmax [B] → room [O, I] with rows `pitch` apart; of each expert, `packed` and `apart` bytes apart
extern "C" __global__ void __launch_bounds__(surogate::threads)
    unpack_nf4(const unsigned char *codes, const float *absmax, int log_block, unsigned short *room, long long pitch,
               int outputs, int inputs, long long packed, long long apart) {
    using namespace surogate;
    const Plain scales(log_block, of_expert(absmax, packed));
    unpack_four_bits(values, of_expert(codes, packed), scales, inputs, of_expert(room, apart), pitch, outputs, inputs);
}

extern "C" __global__ void __launch_bounds__(surogate::threads)
    unpack_nf4_nested(const unsigned char *codes, const unsigned char *absmax_codes, const float *group_absmax,
                      const float *offset, const float *map, int log_block, unsigned short *room, long long pitch,
                      int outputs, int inputs, long long packed, long long apart) {
    using namespace surogate;
    const Nested scales(log_block, of_expert(absmax_codes, packed), of_expert(group_absmax, packed),
                        of_expert(offset, packed), map);
    unpack_four_bits(values, of_expert(codes, packed), scales, inputs, of_expert(room, apart), pitch, outputs, inputs);
}
