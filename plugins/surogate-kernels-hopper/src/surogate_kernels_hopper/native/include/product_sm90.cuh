// What the scaled product needs of Hopper besides: barriers that count bytes, bulk copies, and wgmma of FP8.
//
// Source: PTX ISA 9.0, sections 9.7.13 (mbarrier, barrier.cluster), 9.7.9 (cp.async.bulk, mapa) and 9.7.15.5 (wgmma).
#pragma once
#include "hopper.cuh"

namespace surogate {

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_bulk(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The compiler may not read accumulators before the wait that settles them.
template <int count> __device__ __forceinline__ void settled(float (&d)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Without swizzle: 8 × 16 bytes lie together; `leading` bytes along the inner dimension, 128 along the outer.
__device__ __forceinline__ u64 unswizzled(u32 address, u32 leading) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading >> 4) << 16 | 8ull << 32;
}

#define SUROGATE_F64(how, d, i)                                                                                        \
    SUROGATE_F16(how, d, i), SUROGATE_F16(how, d, i + 16), SUROGATE_F16(how, d, i + 32), SUROGATE_F16(how, d, i + 48)
#define SUROGATE_D128                                                                                                  \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "  \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "   \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, "   \
    "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "   \
    "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "   \
    "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

// d [64, 256] (+)= a · bᵀ, both codes in shared memory, 32 of the inner dimension; a is e5m2 where `gradient`.
template <bool gradient> __device__ __forceinline__ void multiply_codes(float (&d)[128], u64 a, u64 b, int add) {
    if constexpr (gradient) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n256k32.f32.e5m2.e4m3 " SUROGATE_D128 ", %128, %129, p, 1, 1;\n}"
                     : SUROGATE_F64("+f", d, 0), SUROGATE_F64("+f", d, 64)
                     : "l"(a), "l"(b), "r"(add));
    } else {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 " SUROGATE_D128 ", %128, %129, p, 1, 1;\n}"
                     : SUROGATE_F64("+f", d, 0), SUROGATE_F64("+f", d, 64)
                     : "l"(a), "l"(b), "r"(add));
    }
}

// The same of d [64, 128], in e4m3 alone.
template <bool gradient> __device__ __forceinline__ void multiply_codes(float (&d)[64], u64 a, u64 b, int add) {
    static_assert(!gradient, "products of gradients have 256 columns");
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " SUROGATE_D64 ", %64, %65, p, 1, 1;\n}"
                 : SUROGATE_F32("+f", d, 0), SUROGATE_F32("+f", d, 32)
                 : "l"(a), "l"(b), "r"(add));
}

// d [64, 256] += a · bᵀ in bf16, a's 16 columns in registers. `multiply_add` sums over b's rows instead.
__device__ __forceinline__ void multiply_added(float (&d)[128], const u32 *a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " SUROGATE_D128
                 ", {%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
                 : SUROGATE_F64("+f", d, 0), SUROGATE_F64("+f", d, 64)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The same of d [64, 128].
__device__ __forceinline__ void multiply_added(float (&d)[64], const u32 *a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SUROGATE_D64
                 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
                 : SUROGATE_F32("+f", d, 0), SUROGATE_F32("+f", d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Lanes 4q to 4q + 3 exchange, so that lane t has what the four had as x[t], in the order of the lanes.
__device__ __forceinline__ void transpose(u32 (&x)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
        (odd ? x[i] : x[i + 1]) = got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 got = __shfl_xor_sync(~0u, upper ? x[i] : x[i + 2], 2);
        (upper ? x[i] : x[i + 2]) = got;
    }
}

// The threads of both warpgroups that multiply wait for each other.
__device__ __forceinline__ void workers_sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// The blocks of a cluster wait for each other, every thread of theirs, and see what the others wrote before.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 8 floats from the shared memory of a block of the cluster.
__device__ __forceinline__ void load_from_block(float (&x)[8], u32 address, int block) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
#pragma unroll
    for (int i = 0; i < 8; i += 4)
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[i]), "=f"(x[i + 1]), "=f"(x[i + 2]), "=f"(x[i + 3])
                     : "r"(there + 4 * i)
                     : "memory");
}

}  // namespace surogate

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SUROGATE_HOPPER(...) surogate::__VA_ARGS__
#else
#define SUROGATE_HOPPER(...)  // the instructions exist on sm_90a alone
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define SUROGATE_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define SUROGATE_CLUSTER(blocks)
#endif
