// Random bits that depend on a counter alone.
#pragma once

namespace surogate {

// Chris Wellons' lowbias32, as in surogate_core/kernels/ops.py.
__device__ __forceinline__ unsigned hash32(unsigned x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// What counters are mixed with, of a seed and what parts one use of it from another.
__device__ __forceinline__ unsigned key_of(const int *seed, unsigned salt) {
    return hash32(static_cast<unsigned>(*seed) + salt * 0x1e3779b9u);
}

} // namespace surogate
