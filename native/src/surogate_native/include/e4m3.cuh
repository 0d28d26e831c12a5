// Numbers of 8 bits.
#pragma once

namespace surogate {

// The value of an E4M3 code, exact: its exponent and fraction stand in fp32's own fields, 120 below where they belong.
__device__ __forceinline__ float e4m3(unsigned code) {
    const float size = __fmul_rn(__uint_as_float((code & 127u) << 20), 0x1p120f);
    const unsigned bits = (code & 127u) == 127u ? 0x7fffffffu : __float_as_uint(size);
    return __uint_as_float(bits | ((code & 128u) << 24));
}

}  // namespace surogate
