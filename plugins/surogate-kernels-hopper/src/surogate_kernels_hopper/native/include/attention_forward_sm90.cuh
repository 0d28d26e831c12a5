// Attention forward on Hopper: online softmax, the next block's scores multiplied while this one's are softened.
//
// A block takes tiles of queries from a counter until none is left, if it gets a counter, so that the next tile's copies
// overlap this one's end; without one it does the tile of its number.
#pragma once
#include "attention_heads_sm90.cuh"

namespace surogate {

// Largest and sum over the four threads that share a row.
__device__ __forceinline__ float row_maximum(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Softmax of a block on top of what came before: scores become weights; returns by what the old sums shrink.
template <int count>
__device__ __forceinline__ void soften(float (&s)[count], float factor, float (&top)[2], float (&sum)[2],
                                       float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float highest = top[r];
#pragma unroll
        for (int j = 0; j < count / 4; ++j) highest = fmaxf(highest, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        highest = row_maximum(highest);
        // Where nothing was seen yet, minus infinity may not be subtracted from itself.
        const float base = highest == minus_infinity() ? 0.0f : highest * factor;
        shrink[r] = exp2_fast(top[r] * factor - base);
        top[r] = highest;
        float total = 0.0f;
#pragma unroll
        for (int j = 0; j < count / 4; ++j) {
#pragma unroll
            for (int i = 4 * j + 2 * r; i < 4 * j + 2 * r + 2; ++i) {
                s[i] = exp2_fast(fmaf(s[i], factor, -base));
                total += s[i];
            }
        }
        sum[r] = sum[r] * shrink[r] + total;
    }
}

template <int E> struct ForwardShared {
    static constexpr int slots = E > 128 ? 1 : 2;  // tiles of queries
    char q[slots][block_rows * E * 2];
    char k[2][Heads<E>::keys * E * 2];
    char v[2][Heads<E>::keys * E * 2];
    u64 full_q[slots], empty_q[slots], full_k[2], full_v[2], empty_k[2], empty_v[2];
    int item[slots];
    int next[2];
};

struct ForwardWork {
    const u16 *q;
    long long q_row;
    const u16 *k;
    long long k_row;
    const u16 *v;
    long long v_row;
    u16 *out;
    long long out_row;
    float *lse;
    const int *cu_seqlens;
    int borders, tokens, heads, group;
    float factor;
    int *counter;        // 0 before, or none
    const float *sinks;  // [H], or none
    int window;
};

// The addresses of a block's shared memory.
struct ForwardPlaces {
    u32 q, k, v, full_q, empty_q, full_k, full_v, empty_k, empty_v;
};

// The copier's work: queries, and the blocks of keys and values that they see, each as soon as a slot is given back.
template <int E, bool extended>
__device__ __forceinline__ void copy_forward(const ForwardWork &work, ForwardShared<E> &shared,
                                             const ForwardPlaces &at, int tiles) {
    constexpr int KB = Heads<E>::keys, slots = ForwardShared<E>::slots;
    constexpr u32 q_bytes = block_rows * E * 2, bytes = KB * E * 2;
    const int tokens = work.tokens, items = tiles * work.heads;
    Place<slots> q_place;
    Place<2> place;
    int item = blockIdx.x, round = 0;
    while (true) {
        const bool live = item < items;
        int next = items;
        if (live && work.counter != nullptr && threadIdx.x == 0) next = gridDim.x + atomicAdd(work.counter, 1);
        barrier_wait(at.empty_q + 8 * q_place.slot, q_place.parity ^ 1);
        if (threadIdx.x == 0) {
            shared.item[q_place.slot] = live ? item : -1;
            barrier_arrive(at.full_q + 8 * q_place.slot);
        }
        if (!live) {
            barrier_arrive(at.full_q + 8 * q_place.slot);
            break;
        }
        const Item here(item, tiles, work.heads);
        Seen<KB, extended> seen(here.tile, 0);
        const u16 *k = work.k + here.head / work.group * E, *v = work.v + here.head / work.group * E;
        // The first copies need not know where documents begin.
        copy_rows<block_rows, E>(at.q + q_place.slot * q_bytes, work.q + here.head * E, work.q_row, seen.first, 0,
                                 tokens);
        arrive_with_copies(at.full_q + 8 * q_place.slot);
        q_place.next();
        int blocks = 1, begin = 0;
        for (int n = 0; n < blocks; ++n, place.next()) {
            barrier_wait(at.empty_k + 8 * place.slot, place.parity ^ 1);
            copy_rows<KB, E>(at.k + place.slot * bytes, k, work.k_row, seen.first_key(n), begin, tokens);
            arrive_with_copies(at.full_k + 8 * place.slot);
            barrier_wait(at.empty_v + 8 * place.slot, place.parity ^ 1);
            copy_rows<KB, E>(at.v + place.slot * bytes, v, work.v_row, seen.first_key(n), begin, tokens);
            arrive_with_copies(at.full_v + 8 * place.slot);
            if (n == 0) {
                seen.find(work.cu_seqlens, work.borders, tokens, work.window);
                blocks = seen.blocks();
                begin = seen.begin;
            }
        }
        if (threadIdx.x == 0) shared.next[round] = next;
        warpgroup_sync(5);
        item = shared.next[round];
        round ^= 1;  // who reads this has passed before the one after the next is written
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// The outputs and lse of a warpgroup's queries, from sums of weighted values.
template <int E, bool extended, int KB>
__device__ __forceinline__ void store_outputs(const ForwardWork &work, const Seen<KB, extended> &seen, int head,
                                              Wide<E> &o, const float (&top)[2], float (&sum)[2], char *tile,
                                              int worker) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] = row_sum(sum[r]);
        float rescale = 1.0f, log_of = top[r] * work.factor;
        if (extended && work.sinks != nullptr) {
            // A sink is one more term of the sum, without a value.
            const float sink = __ldg(work.sinks + head) * 1.4426950408889634f, own = log_of;
            log_of = fmaxf(own, sink);
            rescale = exp2f(own - log_of);
            sum[r] = sum[r] * rescale + exp2f(sink - log_of);
        }
        const float inverse = extended ? rescale / sum[r] : 1.0f / sum[r];
#pragma unroll
        for (int part = 0; part < Heads<E>::parts; ++part) {
#pragma unroll
            for (int j = 0; j < Heads<E>::count / 4; ++j) {
                o[part][4 * j + 2 * r] *= inverse;
                o[part][4 * j + 2 * r + 1] *= inverse;
            }
        }
        const int row = seen.row + 8 * r;
        if (threadIdx.x % 4 == 0 && row < work.tokens)
            work.lse[static_cast<long long>(head) * work.tokens + row] = log_of + log2f(sum[r]);
    }
    store_rows<E>(o, 1.0f, tile, block_rows * 128, work.out + seen.own_first * work.out_row + head * E, work.out_row,
                  work.tokens - seen.own_first, 1 + worker);
}

// A warpgroup's 64 queries of a tile.
template <int E, bool extended, bool turns>
__device__ __forceinline__ void attend(const ForwardWork &work, const ForwardPlaces &at, const Item &here, u32 q_tile,
                                       char *q_memory, Place<2> &place, int worker) {
    constexpr int KB = Heads<E>::keys;
    constexpr u32 q_half = block_rows * 128, half = KB * 128, bytes = KB * E * 2;
    const int lane = threadIdx.x % 32;
    Seen<KB, extended> seen(here.tile, worker);
    const u64 q_operand = by_columns(q_tile + worker * half_rows * 128);
    seen.find(work.cu_seqlens, work.borders, work.tokens, work.window);
    const int blocks = seen.blocks(), own_blocks = seen.own_blocks(), skip = KB < block_rows ? seen.skip() : 0;
    Wide<E> o;
    float s[KB / 2], top[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.0f, 0.0f}, shrink[2];
    u32 p[KB / 16][4];
    clear(o);
    if (KB < block_rows) {
        pass(at.full_k, at.empty_k, at.full_v, at.empty_v, place, skip);
        if (turns && skip > 0) {
            take_turn(worker);
            give_turn(worker);
        }
    }
    barrier_wait(at.full_k + 8 * place.slot, place.parity);
    fence_shared();
    wgmma_fence();
    scores<E>(s, q_operand, q_half, by_columns(at.k + place.slot * bytes), half);
    wgmma_commit();
    wgmma_wait<0>();
    settled(s);
    if (lane == 0) barrier_arrive(at.empty_k + 8 * place.slot);
#pragma unroll
    for (int i = 0; i < KB / 2; ++i) s[i] = seen.sees(i, seen.first_key(skip)) ? s[i] : minus_infinity();
    soften(s, work.factor, top, sum, shrink);
    rounded(p, s);
    Place<2> before = place;
    place.next();
    for (int n = skip + 1; n < own_blocks; ++n) {
        const int first = seen.first_key(n);
        if (turns) take_turn(worker);
        barrier_wait(at.full_k + 8 * place.slot, place.parity);
        fence_shared();
        wgmma_fence();
        scores<E>(s, q_operand, q_half, by_columns(at.k + place.slot * bytes), half);
        wgmma_commit();
        barrier_wait(at.full_v + 8 * before.slot, before.parity);
        fence_shared();
        wgmma_fence();
        product_add(o, p, at.v + before.slot * bytes, half);
        wgmma_commit();
        if (turns) give_turn(worker);
        wgmma_wait<1>();
        settled(s);
        if (lane == 0) barrier_arrive(at.empty_k + 8 * place.slot);
        if (seen.masked(first)) {
#pragma unroll
            for (int i = 0; i < KB / 2; ++i) s[i] = seen.sees(i, first) ? s[i] : minus_infinity();
        }
        soften(s, work.factor, top, sum, shrink);
        wgmma_wait<0>();
        settled(o);
        if (lane == 0) barrier_arrive(at.empty_v + 8 * before.slot);
#pragma unroll
        for (int part = 0; part < Heads<E>::parts; ++part) {
#pragma unroll
            for (int i = 0; i < Heads<E>::count; ++i) o[part][i] *= shrink[i % 4 / 2];
        }
        rounded(p, s);
        before.next();
        place.next();
    }
    barrier_wait(at.full_v + 8 * before.slot, before.parity);
    fence_shared();
    wgmma_fence();
    product_add(o, p, at.v + before.slot * bytes, half);
    wgmma_commit();
    wgmma_wait<0>();
    settled(o);
    if (lane == 0) barrier_arrive(at.empty_v + 8 * before.slot);
    if (turns) {
        // One by one: the other warpgroup's turn may wait for a block that needs this one's slot.
        for (int n = own_blocks; n < blocks; ++n) {
            take_turn(worker);
            give_turn(worker);
            pass(at.full_k, at.empty_k, at.full_v, at.empty_v, place, 1);
        }
    } else {
        pass(at.full_k, at.empty_k, at.full_v, at.empty_v, place, blocks - own_blocks);
    }
    store_outputs<E>(work, seen, here.head, o, top, sum, q_memory + worker * half_rows * 128, worker);
}

template <int E, bool extended, bool turns> __device__ __forceinline__ void forward(const ForwardWork &work) {
    using Shared = ForwardShared<E>;
    constexpr int slots = Shared::slots;
    constexpr u32 q_bytes = block_rows * E * 2;
    static_assert(sizeof(Shared) <= slots * q_bytes + 4 * Heads<E>::keys * E * 2 + 1024, "what a launch asks for");
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int role = __shfl_sync(~0u, threadIdx.x / warpgroup, 0);
    const ForwardPlaces at = {shared_address(shared.q),       shared_address(shared.k),      shared_address(shared.v),
                              shared_address(shared.full_q),  shared_address(shared.empty_q),
                              shared_address(shared.full_k),  shared_address(shared.full_v),
                              shared_address(shared.empty_k), shared_address(shared.empty_v)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < slots; ++i) {
            barrier_init(at.full_q + 8 * i, warpgroup + 1);  // each copier's copies, and the item's number
            barrier_init(at.empty_q + 8 * i, 2 * warpgroup);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(at.full_k + 8 * i, warpgroup);
            barrier_init(at.full_v + 8 * i, warpgroup);
            barrier_init(at.empty_k + 8 * i, 8);
            barrier_init(at.empty_v + 8 * i, 8);
        }
    }
    __syncthreads();
    const int tiles = (work.tokens + block_rows - 1) / block_rows;
    if (role == 0) {
        registers_down<copier_registers>();
        copy_forward<E, extended>(work, shared, at, tiles);
    } else {
        registers_up<worker_registers>();
        const int worker = role - 1;
        if (turns && worker == 1) give_turn(worker);
        Place<slots> q_place;
        Place<2> place;
        for (;; q_place.next()) {
            barrier_wait(at.full_q + 8 * q_place.slot, q_place.parity);
            const int item = shared.item[q_place.slot];
            if (item < 0) break;
            attend<E, extended, turns>(work, at, Item(item, tiles, work.heads), at.q + q_place.slot * q_bytes,
                                       shared.q[q_place.slot], place, worker);
            barrier_arrive(at.empty_q + 8 * q_place.slot);
        }
    }
}

}  // namespace surogate

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SUROGATE_FORWARD_BODY(...)                                                                                     \
    surogate::forward<__VA_ARGS__>({q, q_row, k, k_row, v, v_row, out, out_row, lse, cu_seqlens, borders, tokens,      \
                                    heads, group, factor, counter, sinks, window})
#else
#define SUROGATE_FORWARD_BODY(...)  // the instructions exist on sm_90a alone
#endif
// NAME, E, extended, turns
#define SUROGATE_FORWARD(NAME, ...)                                                                                    \
    extern "C" __global__ void __launch_bounds__(surogate::threads, 1) NAME(                                           \
        const surogate::u16 *q, long long q_row, const surogate::u16 *k, long long k_row, const surogate::u16 *v,      \
        long long v_row, surogate::u16 *out, long long out_row, float *lse, const int *cu_seqlens, int borders,        \
        int tokens, int heads, int group, float factor, int *counter, const float *sinks, int window) {                \
        SUROGATE_FORWARD_BODY(__VA_ARGS__);                                                                            \
    }
