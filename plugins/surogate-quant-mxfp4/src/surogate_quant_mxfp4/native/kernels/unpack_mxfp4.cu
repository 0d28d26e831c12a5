// MXFP4 weights to bf16: an E2M1 code times the power of two of its 32, which is exact in fp32, rounded once.

#include "e2m1.cuh"
#include "four_bits.cuh"

namespace surogate {

// E8M0: the exponent of fp32, of which 0 is 2^-127, a subnormal number, and 255 NaN.
struct Powers {
    const unsigned char *codes;
    __device__ __forceinline__ float at(long long element) const {
        const unsigned code = __ldg(codes + element / 32);
        return __uint_as_float(code == 0u ? 0x00400000u : code == 255u ? 0x7fc00000u : code << 23);
    }
    __device__ __forceinline__ unsigned pair(const float *table, unsigned byte, float scale) const {
        return bf16x2(__fmul_rn(table[byte & 15u], scale), __fmul_rn(table[byte >> 4], scale));
    }
};

}  // namespace surogate

// codes [O, Q/2], powers [O, Q/32] with Q the inputs up to a multiple of 32 → room [O, I], rows `pitch` apart; of each
// expert, `packed` and `apart` bytes apart
extern "C" __global__ void __launch_bounds__(surogate::threads)
    unpack_mxfp4(const unsigned char *codes, const unsigned char *powers, int padded, unsigned short *room,
                 long long pitch, int outputs, int inputs, long long packed, long long apart) {
    using namespace surogate;
    unpack_four_bits(e2m1, of_expert(codes, packed), Powers{of_expert(powers, packed)}, padded, of_expert(room, apart),
                     pitch, outputs, inputs);
}
