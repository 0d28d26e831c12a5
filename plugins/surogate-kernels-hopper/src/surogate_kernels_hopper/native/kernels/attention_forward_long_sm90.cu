// Attention forward on Hopper over long documents, heads of 128 features: what attention_forward_sm90.cuh computes, bit
// for bit, by a block for each tile of queries. On rows of 16384 tokens it is 5 % faster, on short documents slower.

#include "attention_forward_sm90.cuh"

namespace surogate {

constexpr u32 big_tile = 2 * big_half;

// A tile of queries and the keys that they see; a warpgroup's 64 of them, of which each thread has two, 8 apart.
struct Queries {
    int tile, head, first, begin, last_border;
    int own_first, own_begin, row, start, start8;
    __device__ __forceinline__ Queries(int heads, int worker) {
        // The longest sums begin first.
        tile = gridDim.x / heads - 1 - blockIdx.x / heads;
        head = blockIdx.x % heads;
        first = tile * block_rows;
        own_first = first + worker * half_rows;
        row = own_first + threadIdx.x % warpgroup / 32 * 16 + threadIdx.x % 32 / 4;
    }
    __device__ __forceinline__ void find(const int *cu_seqlens, int borders, int tokens) {
        own_begin = start = start8 = 0;
        const Documents documents(cu_seqlens, borders, tokens, first, min(first + block_rows, tokens) - 1,
                                  [&](int border) {
                                      if (border <= own_first) own_begin = border;
                                      if (border <= row) start = border;
                                      if (border <= row + 8) start8 = border;
                                  });
        begin = documents.begin;
        last_border = documents.last_border;
        own_begin = max(own_begin, begin);
        start = max(start, begin);
        start8 = max(start8, begin);
    }
    __device__ __forceinline__ int blocks() const { return tile - begin / block_rows + 1; }
    __device__ __forceinline__ int own_blocks() const { return tile - own_begin / block_rows + 1; }
    __device__ __forceinline__ bool masked(int key_block) const {
        return key_block + block_rows - 1 > own_first || key_block < last_border;
    }
    // Whether accumulator i of a [64, 128] block of scores counts.
    __device__ __forceinline__ bool sees(int i, int key_block) const {
        const int key = key_block + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        return i % 4 < 2 ? key <= row && key >= start : key <= row + 8 && key >= start8;
    }
};

// The copier's work behind the tile's own block of keys: the blocks before it, each as soon as a slot is given back.
__device__ __forceinline__ void copy_keys(const Queries &queries, int tokens, const u16 *k, long long k_row,
                                          const u16 *v, long long v_row, u32 k_tile, u32 v_tile, u32 full_k,
                                          u32 empty_k, u32 full_v, u32 empty_v) {
    Place<2> place;
    place.next();
    for (int n = 1; n < queries.blocks(); ++n, place.next()) {
        const int first = (queries.tile - n) * block_rows;
        barrier_wait(empty_k + 8 * place.slot, place.parity ^ 1);
        copy_tile<block_rows>(k_tile + place.slot * big_tile, k, k_row, first, queries.begin, tokens);
        arrive_with_copies(full_k + 8 * place.slot);
        barrier_wait(empty_v + 8 * place.slot, place.parity ^ 1);
        copy_tile<block_rows>(v_tile + place.slot * big_tile, v, v_row, first, queries.begin, tokens);
        arrive_with_copies(full_v + 8 * place.slot);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

struct LongShared {
    char q[big_tile];
    char k[2][big_tile];
    char v[2][big_tile];
    u64 full_q, full_k[2], full_v[2], empty_k[2], empty_v[2];
};
static_assert(sizeof(LongShared) <= 5 * big_tile + 1024, "what a launch asks for");

__device__ void forward_long(const u16 *q, long long q_row, const u16 *k, long long k_row, const u16 *v, long long v_row,
                        u16 *out, long long out_row, float *lse, const int *cu_seqlens, int borders, int tokens,
                             int heads, int group, float factor) {
    extern __shared__ __align__(1024) char memory[];
    LongShared &shared = *reinterpret_cast<LongShared *>(memory);
    const int role = __shfl_sync(~0u, threadIdx.x / warpgroup, 0);
    const u32 full_q = shared_address(&shared.full_q), full_k = shared_address(shared.full_k),
              full_v = shared_address(shared.full_v),
              empty_k = shared_address(shared.empty_k), empty_v = shared_address(shared.empty_v);
    if (threadIdx.x == 0) {
        barrier_init(full_q, warpgroup);
        for (int i = 0; i < 2; ++i) {
            barrier_init(full_k + 8 * i, warpgroup);
            barrier_init(full_v + 8 * i, warpgroup);
            barrier_init(empty_k + 8 * i, 8);
            barrier_init(empty_v + 8 * i, 8);
        }
    }
    __syncthreads();
    const u32 q_tile = shared_address(shared.q), k_tile = shared_address(shared.k), v_tile = shared_address(shared.v);
    Queries queries(heads, role - 1);
    if (role == 0) {
        registers_down<copier_registers>();
        q += queries.head * features;
        k += queries.head / group * features;
        v += queries.head / group * features;
        // The first copies need not know where documents begin.
        copy_tile<block_rows>(q_tile, q, q_row, queries.first, 0, tokens);
        arrive_with_copies(full_q);
        copy_tile<block_rows>(k_tile, k, k_row, queries.first, 0, tokens);
        arrive_with_copies(full_k);
        copy_tile<block_rows>(v_tile, v, v_row, queries.first, 0, tokens);
        arrive_with_copies(full_v);
        queries.find(cu_seqlens, borders, tokens);
        copy_keys(queries, tokens, k, k_row, v, v_row, k_tile, v_tile, full_k, empty_k, full_v, empty_v);
    } else {
        registers_up<worker_registers>();
        Place<2> place;
        const int worker = role - 1, lane = threadIdx.x % 32;
        const u64 q_operand = by_columns(q_tile + worker * half_rows * 128);
        queries.find(cu_seqlens, borders, tokens);
        const int blocks = queries.blocks(), own_blocks = queries.own_blocks();
        float o[64], s[64], top[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.0f, 0.0f}, shrink[2];
        u32 p[8][4];
        clear(o);
        barrier_wait(full_q, 0);
        barrier_wait(full_k, 0);
        fence_shared();
        wgmma_fence();
        product(s, q_operand, big_half, by_columns(k_tile), big_half);
        wgmma_commit();
        wgmma_wait<0>();
        settled(s);
        if (lane == 0) barrier_arrive(empty_k);
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] = queries.sees(i, queries.first) ? s[i] : minus_infinity();
        soften(s, factor, top, sum, shrink);
        rounded(p, s);
        Place<2> before = place;
        place.next();
        for (int n = 1; n < own_blocks; ++n) {
            const int first = (queries.tile - n) * block_rows;
            barrier_wait(full_k + 8 * place.slot, place.parity);
            fence_shared();
            wgmma_fence();
            product(s, q_operand, big_half, by_columns(k_tile + place.slot * big_tile), big_half);
            wgmma_commit();
            barrier_wait(full_v + 8 * before.slot, before.parity);
            fence_shared();
            wgmma_fence();
            product_add(o, p, by_rows(v_tile + before.slot * big_tile, big_half));
            wgmma_commit();
            wgmma_wait<1>();
            settled(s);
            if (lane == 0) barrier_arrive(empty_k + 8 * place.slot);
            if (queries.masked(first)) {
#pragma unroll
                for (int i = 0; i < 64; ++i) s[i] = queries.sees(i, first) ? s[i] : minus_infinity();
            }
            soften(s, factor, top, sum, shrink);
            wgmma_wait<0>();
            settled(o);
            if (lane == 0) barrier_arrive(empty_v + 8 * before.slot);
#pragma unroll
            for (int i = 0; i < 64; ++i) o[i] *= shrink[i % 4 / 2];
            rounded(p, s);
            before.next();
            place.next();
        }
        barrier_wait(full_v + 8 * before.slot, before.parity);
        fence_shared();
        wgmma_fence();
        product_add(o, p, by_rows(v_tile + before.slot * big_tile, big_half));
        wgmma_commit();
        wgmma_wait<0>();
        settled(o);
        if (lane == 0) barrier_arrive(empty_v + 8 * before.slot);
        pass(full_k, empty_k, full_v, empty_v, place, blocks - own_blocks);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] = row_sum(sum[r]);
            const float inverse = 1.0f / sum[r];
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                o[4 * j + 2 * r] *= inverse;
                o[4 * j + 2 * r + 1] *= inverse;
            }
            const int row = queries.row + 8 * r;
            if (lane % 4 == 0 && row < tokens)
                lse[static_cast<long long>(queries.head) * tokens + row] = top[r] * factor + log2f(sum[r]);
        }
        store_block(o, 1.0f, shared.q + worker * half_rows * 128, big_half,
                    out + queries.own_first * out_row + queries.head * features, out_row,
                    tokens - queries.own_first, 1 + worker);
    }
}

}  // namespace surogate

extern "C" __global__ void __launch_bounds__(surogate::threads, 1)
    attention_forward_long(const surogate::u16 *q, long long q_row, const surogate::u16 *k, long long k_row,
                      const surogate::u16 *v, long long v_row, surogate::u16 *out, long long out_row, float *lse,
                      const int *cu_seqlens, int borders, int tokens, int heads, int group, float factor) {
    SUROGATE_HOPPER(forward_long(q, q_row, k, k_row, v, v_row, out, out_row, lse, cu_seqlens, borders, tokens, heads, group,
                            factor));
}
