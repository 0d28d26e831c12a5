// NVFP4 weights to bf16: an E2M1 code times the E4M3 scale of its 16 (exact in fp32), times the weight's own, rounded once.

#include "e2m1.cuh"
#include "e4m3.cuh"
#include "four_bits.cuh"

namespace surogate {

struct Scales {
    const unsigned char *codes;
    float decode;
    __device__ __forceinline__ float at(long long element) const { return e4m3(__ldg(codes + element / 16)); }
    __device__ __forceinline__ unsigned pair(const float *table, unsigned byte, float scale) const {
        const float lower = __fmul_rn(__fmul_rn(table[byte & 15u], scale), decode);
        return bf16x2(lower, __fmul_rn(__fmul_rn(table[byte >> 4], scale), decode));
    }
};

}  // namespace surogate

// codes [O, Q/2], scales [O, Q/16] with Q the inputs up to a multiple of 16, decode [1] → room [O, I], rows `pitch`
// apart; of each expert, `packed` and `apart` bytes apart
extern "C" __global__ void __launch_bounds__(surogate::threads)
    unpack_nvfp4(const unsigned char *codes, const unsigned char *scales, const float *decode, int padded,
                 unsigned short *room, long long pitch, int outputs, int inputs, long long packed,
                 long long apart) {
    using namespace surogate;
    const Scales own{of_expert(scales, packed), __ldg(of_expert(decode, packed))};
    unpack_four_bits(e2m1, of_expert(codes, packed), own, padded, of_expert(room, apart), pitch, outputs, inputs);
}
