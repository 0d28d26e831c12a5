// Pairs of bf16 without the toolkit's headers.
#pragma once

namespace surogate {

// Two floats rounded to nearest, ties to even, the first in the lower half; NaN stays NaN.
__device__ __forceinline__ unsigned bf16x2(float lower, float upper) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(upper), "f"(lower));
    return both;
}

__device__ __forceinline__ float low_of(unsigned both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(unsigned both) { return __uint_as_float(both & 0xffff0000u); }

}  // namespace surogate
