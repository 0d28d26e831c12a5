// Hopper's asynchronous parts: barriers in shared memory, copies into it, and products of a warpgroup (wgmma).
//
// A tile is [rows, 128] of bf16, kept as two halves of 64 columns; a row of a half is 128 bytes, whose 16-byte
// chunk c stands at c ^ (row % 8): the 128-byte swizzle that wgmma reads. A half begins at a multiple of 1024.
// Source: PTX ISA 9.0, sections 9.7.15.5 (wgmma: fragments, layouts, descriptors) and 9.7.13 (mbarrier).
#pragma once

namespace surogate {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

[[maybe_unused]] constexpr int features = 128;
constexpr int warpgroup = 128;

__device__ __forceinline__ u32 shared_address(const void *pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}

// 16 bytes from global to shared memory; zeros where `inside` is false, and then nothing is read.
__device__ __forceinline__ void copy16(u32 to, const void *from, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
}

// The barrier counts this thread when its copies so far have landed.
__device__ __forceinline__ void arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// What other threads copied and this thread has waited for becomes visible to wgmma.
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

template <int count> __device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count> __device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Threads of one warpgroup wait for each other; `name` is 1 to 15.
__device__ __forceinline__ void warpgroup_sync(int name) {
    asm volatile("bar.sync %0, 128;" ::"r"(name) : "memory");
}

// Bits 0-13 address, 16-29 leading offset, 32-45 stride offset, each over 16; 62: 128-byte swizzle.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32 | 1ull << 62;
}

// Rows are the operand's outer dimension, the 128 columns what is summed over: groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 by_columns(u32 tile) { return descriptor(tile, 16, 1024); }
// Rows are what is summed over, the 128 columns the outer dimension: its two halves are `half` bytes apart.
__device__ __forceinline__ u64 by_rows(u32 tile, u32 half) { return descriptor(tile, half, 1024); }

// Step s of 8 along the columns of a tile, whose halves are `half` bytes apart.
__device__ __forceinline__ u64 column_step(u64 of, int s, u32 half) { return of + (s / 4) * (half >> 4) + (s % 4) * 2; }
// Step s along its rows, 16 at a time.
__device__ __forceinline__ u64 row_step(u64 of, int s) { return of + s * (2048 >> 4); }

#define SUROGATE_F4(how, d, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3])
#define SUROGATE_F16(how, d, i)                                                                                        \
    SUROGATE_F4(how, d, i), SUROGATE_F4(how, d, i + 4), SUROGATE_F4(how, d, i + 8), SUROGATE_F4(how, d, i + 12)
#define SUROGATE_F32(how, d, i) SUROGATE_F16(how, d, i), SUROGATE_F16(how, d, i + 16)
#define SUROGATE_D32                                                                                                   \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "  \
    "%24, %25, %26, %27, %28, %29, %30, %31}"
#define SUROGATE_D64                                                                                                   \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "  \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "   \
    "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// d [64, 64] or [64, 128] = a · bᵀ, both in shared memory and summed over their columns; 16 columns a call. The first
// call only writes d: were it said to read it, the compiler would have to bring something there first.
__device__ __forceinline__ void multiply(float (&d)[32], u64 a, u64 b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SUROGATE_D32 ", %32, %33, p, 1, 1, 0, 0;\n}"
                 : SUROGATE_F32("=f", d, 0)
                 : "l"(a), "l"(b));
}

__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SUROGATE_D64 ", %64, %65, p, 1, 1, 0, 0;\n}"
                 : SUROGATE_F32("=f", d, 0), SUROGATE_F32("=f", d, 32)
                 : "l"(a), "l"(b));
}

__device__ __forceinline__ void multiply_add(float (&d)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SUROGATE_D32 ", %32, %33, 1, 1, 1, 0, 0;"
                 : SUROGATE_F32("+f", d, 0)
                 : "l"(a), "l"(b));
}

__device__ __forceinline__ void multiply_add(float (&d)[64], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SUROGATE_D64 ", %64, %65, 1, 1, 1, 0, 0;"
                 : SUROGATE_F32("+f", d, 0), SUROGATE_F32("+f", d, 32)
                 : "l"(a), "l"(b));
}

// d [64, 128] += a · b, a's 16 columns in registers, b summed over its rows.
__device__ __forceinline__ void multiply_add(float (&d)[64], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " SUROGATE_D64
                 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : SUROGATE_F32("+f", d, 0), SUROGATE_F32("+f", d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d = a · bᵀ over the 128 columns of two tiles whose halves are half_a and half_b bytes apart.
template <int count> __device__ __forceinline__ void product(float (&d)[count], u64 a, u32 half_a, u64 b, u32 half_b) {
    multiply(d, a, b);
#pragma unroll
    for (int s = 1; s < features / 16; ++s) multiply_add(d, column_step(a, s, half_a), column_step(b, s, half_b));
}

// d += a · b over the steps of a; a as accumulators that were rounded in place by `rounded`.
template <int steps> __device__ __forceinline__ void product_add(float (&d)[64], const u32 (&a)[steps][4], u64 b) {
#pragma unroll
    for (int s = 0; s < steps; ++s) multiply_add(d, a[s], row_step(b, s));
}

__device__ __forceinline__ u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Accumulators [64, 16 · steps] as the left operand of the next product.
template <int count> __device__ __forceinline__ void rounded(u32 (&a)[count / 8][4], const float (&d)[count]) {
#pragma unroll
    for (int s = 0; s < count / 8; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[s][i] = pair(d[8 * s + 2 * i], d[8 * s + 2 * i + 1]);
    }
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A [64, 128] block of accumulators, times `factor`, into rows of global memory, through 64 rows of a tile that this
// warpgroup alone uses. `to` is row 0's first element; rows from `rows` on are left out.
__device__ __forceinline__ void store_block(const float (&d)[64], float factor, char *tile, u32 half, u16 *to,
                                            long long row_stride, int rows, int name) {
    const int thread = threadIdx.x % warpgroup, warp = thread / 32, lane = thread % 32;
    const int row = warp * 16 + lane / 4;
    warpgroup_sync(name);  // what was stored through the tile before has been read
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        // Rows row and row + 8 have the same swizzle.
        char *at = tile + (j / 8) * half + row * 128 + ((j % 8) ^ (row % 8)) * 16 + (lane % 4) * 4;
        *reinterpret_cast<u32 *>(at) = pair(d[4 * j] * factor, d[4 * j + 1] * factor);
        *reinterpret_cast<u32 *>(at + 1024) = pair(d[4 * j + 2] * factor, d[4 * j + 3] * factor);
    }
    warpgroup_sync(name);
    const int chunk = thread % 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int r = thread / 16 + 8 * i;
        if (r < rows)
            *reinterpret_cast<uint4 *>(to + r * row_stride + chunk * 8) = *reinterpret_cast<const uint4 *>(
                tile + (chunk / 8) * half + r * 128 + ((chunk % 8) ^ (r % 8)) * 16);
    }
}

// One warpgroup copies rows [first, first + rows) of a [N, 128] matrix into a tile; zeros outside [begin, end).
template <int rows>
__device__ __forceinline__ void copy_tile(u32 tile, const u16 *from, long long row_stride, int first, int begin,
                                          int end) {
    const int thread = threadIdx.x % warpgroup, chunk = thread % 16, row = thread / 16;
    const u32 to = tile + (chunk / 8) * (rows * 128) + row * 128 + ((chunk % 8) ^ row) * 16;
    const u16 *source = from + (first + row) * row_stride + chunk * 8;
#pragma unroll 4
    for (int i = 0; i < rows / 8; ++i) {
        const int token = first + row + 8 * i;
        copy16(to + i * 1024, source + 8 * i * row_stride, token >= begin && token < end);
    }
}

}  // namespace surogate
