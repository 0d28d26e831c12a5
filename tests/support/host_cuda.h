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
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct Index {
    unsigned x;
};
inline thread_local Index threadIdx, blockIdx;
inline std::barrier<> *block_barrier;
inline void __syncthreads() { block_barrier->arrive_and_wait(); }

struct uint2 {
    unsigned x, y;
};

using std::max;
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
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline void atomicMax(unsigned *to, unsigned value) {
    std::atomic_ref<unsigned> cell(*to);
    for (unsigned old = cell; old < value && !cell.compare_exchange_weak(old, value);) {}
}

// Pointers and integers alone, each in a slot of its own: so a kernel can be called without its signature.
using Slot = std::uint64_t;
using Kernel = void (*)(Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot);

extern "C" void launch(Kernel kernel, unsigned blocks, unsigned threads, const Slot *a) {
    std::barrier<> barrier(threads);
    block_barrier = &barrier;
    std::vector<std::jthread> block;
    for (unsigned thread = 0; thread < threads; ++thread)
        block.emplace_back([=, &barrier] {
            threadIdx.x = thread;
            for (unsigned number = 0; number < blocks; ++number) {
                blockIdx.x = number;
                kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13]);
                barrier.arrive_and_wait();
            }
        });
}
