// As much of CUDA as the kernels without tensor cores use, for a host compiler: a thread block is as many threads,
// blocks run one after the other. Floating point is what the compiler makes of it without contraction.
#pragma once
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct Index {
    unsigned x, y, z;
};
inline thread_local Index threadIdx, blockIdx, gridDim;
inline std::barrier<> *block_barrier;
inline void __syncthreads() { block_barrier->arrive_and_wait(); }

template <typename T>
inline T __ldg(const T *from) {
    return *from;
}
template <typename T>
inline T __ldcs(const T *from) {
    return *from;
}

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max, std::min;
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
// Two floats rounded to bf16, to nearest, ties to even, the first in the lower half.
inline unsigned host_bf16x2(float lower, float upper) {
    const auto rounded = [](float x) {
        const unsigned bits = __float_as_uint(x);
        return x != x ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    };
    return rounded(lower) | (rounded(upper) << 16);
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline void atomicMax(unsigned *to, unsigned value) {
    std::atomic_ref<unsigned> cell(*to);
    for (unsigned old = cell; old < value && !cell.compare_exchange_weak(old, value);) {}
}

// The block is one warp.
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    static std::atomic<unsigned> largest;
    __syncthreads();
    largest = 0;
    __syncthreads();
    atomicMax(reinterpret_cast<unsigned *>(&largest), value);
    __syncthreads();
    return largest;
}

// Pointers and integers, each in a slot of its own, and floats: where the two are passed in registers of their own, as
// on x86-64 and AArch64, a kernel can be called without its signature.
using Slot = std::uint64_t;
using Kernel = void (*)(Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot,
                        Slot, Slot, float, float, float, float, float, float, float, float);

extern "C" void launch(Kernel kernel, const unsigned *blocks, unsigned threads, const Slot *a, const float *f) {
    std::barrier<> barrier(threads);
    block_barrier = &barrier;
    std::vector<std::jthread> block;
    for (unsigned thread = 0; thread < threads; ++thread)
        block.emplace_back([=, &barrier] {
            threadIdx.x = thread;
            gridDim = {blocks[0], blocks[1], blocks[2]};
            for (unsigned number = 0; number < blocks[0] * blocks[1] * blocks[2]; ++number) {
                blockIdx = {number % blocks[0], number / blocks[0] % blocks[1], number / blocks[0] / blocks[1]};
                kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14],
                       a[15], a[16], a[17], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]);
                barrier.arrive_and_wait();
            }
        });
}
