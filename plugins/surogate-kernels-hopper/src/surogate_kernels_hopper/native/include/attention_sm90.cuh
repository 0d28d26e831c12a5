// What the kernels of attention on Hopper share: causal, over packed documents, in bf16.
//
// The scheme is FlashAttention-2's (arXiv 2307.08691) with FlashAttention-3's division of labour (arXiv 2407.08608):
// one warpgroup copies tiles into shared memory, two multiply. The row of documents is cut into tiles of 128 tokens
// wherever documents begin; a block finds the documents of its tile in cu_seqlens [S], so the grid depends on the
// number of tokens alone. Every output has one block and one order of summation: equal inputs give equal bits.
//
// N tokens, H query heads, K key/value heads. Strides are of rows, in elements; heads lie beside each other. Scores
// are taken times `factor` = scale · log2(e), for exp2; lse [H, N] is log2 of the sum of exponentials.
#pragma once
#include "hopper.cuh"

namespace surogate {

// On other architectures the kernels are empty, and nothing needs these.
[[maybe_unused]] constexpr int block_rows = 128;             // tokens of a tile
[[maybe_unused]] constexpr int half_rows = 64;               // a warpgroup's share of it
[[maybe_unused]] constexpr u32 big_half = block_rows * 128;  // bytes of a half of a tile of 128 rows
[[maybe_unused]] constexpr int threads = 3 * warpgroup;
[[maybe_unused]] constexpr int copier_registers = 40, worker_registers = 232;

// Where a part of the work stands: slot of a ring and the parity of its barriers.
template <int slots> struct Place {
    int slot = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++slot == slots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// The compiler may not read accumulators before the wait that settles them.
template <int count> __device__ __forceinline__ void settled(float (&d)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Give back key blocks unread that only the other warpgroup's documents reach. A slot may be given back when it has been
// filled and not before, or its barrier would count one round's arrivals into another.
__device__ __forceinline__ void pass(u32 full_k, u32 empty_k, u32 full_v, u32 empty_v, Place<2> &place, int count) {
    for (; count > 0; --count, place.next()) {
        barrier_wait(full_k + 8 * place.slot, place.parity);
        barrier_wait(full_v + 8 * place.slot, place.parity);
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(empty_k + 8 * place.slot);
            barrier_arrive(empty_v + 8 * place.slot);
        }
    }
}

// Accumulators begin at zero. The compiler may not share the zeros: it would then copy them where products are in flight.
template <int count> __device__ __forceinline__ void clear(float (&d)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[i]));
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// The documents of a tile of tokens [first, last], from one look at the borders by every warp. Borders ascend from 0.
// `visit` is called with every border within (first, last], in their order.
struct Documents {
    int begin = 0;          // where the first token's document begins
    int end;                // where the last token's document ends
    int last_border = 0;    // the last border at or before `last`
    template <typename Visit>
    __device__ __forceinline__ Documents(const int *cu_seqlens, int borders, int tokens, int first, int last,
                                         const Visit &visit) {
        end = tokens;
        for (int base = 0; base < borders; base += 32) {
            const int number = base + threadIdx.x % 32;
            const int border = number < borders ? min(__ldg(cu_seqlens + number), tokens) : tokens;
            begin = max(begin, __reduce_max_sync(~0u, border <= first ? border : 0));
            end = min(end, __reduce_min_sync(~0u, border > last ? border : tokens));
            for (u32 inside = __ballot_sync(~0u, border > first && border <= last); inside; inside &= inside - 1) {
                last_border = __shfl_sync(~0u, border, __ffs(inside) - 1);
                visit(last_border);
            }
        }
        last_border = max(last_border, begin);
    }
};

}  // namespace surogate

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SUROGATE_HOPPER(call) surogate::call
#else
#define SUROGATE_HOPPER(call)  // the instructions exist on sm_90a alone
#endif
