// Attention backward on Hopper, in two kernels: one has the queries' gradient, one the keys' and values'.
//
// Each computes the scores for itself: seven products where five would do, but nothing is added up between blocks, and
// neither weights nor gradients of scores leave the registers. Products take them from there; where keys are the rows
// of the result, the scores are computed transposed. With heads of 256 the two gradients of 64 keys fill the registers
// of two warpgroups: one has dv and hands the weights to the other, which has dk.
#pragma once
#include "attention_heads_sm90.cuh"

namespace surogate {

struct BackwardWork {
    const u16 *q;
    long long q_row;
    const u16 *k;
    long long k_row;
    const u16 *v;
    long long v_row;
    const u16 *out;
    long long out_row;
    const u16 *dy;
    long long dy_row;
    const float *lse;
    float *delta;
    u16 *dq, *dk, *dv;
    const int *cu_seqlens;
    int borders, tokens, heads, group;  // of queries, and how many of them share keys
    float scale, factor;
    int window;
};

template <int E> struct QueriesShared {
    static constexpr int v_slots = E > 128 ? 1 : 2;
    char q[block_rows * E * 2];
    char dy[block_rows * E * 2];
    char k[2][Heads<E>::keys * E * 2];
    char v[v_slots][Heads<E>::keys * E * 2];
    u64 full_q, full_dy, full_k[2], full_v[v_slots], empty_k[2], empty_v[v_slots];
};

__device__ __forceinline__ float dot(uint4 x, uint4 y) {
    const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        total = fmaf(__uint_as_float(xs[i] << 16), __uint_as_float(ys[i] << 16), total);
        total = fmaf(__uint_as_float(xs[i] & 0xffff0000u), __uint_as_float(ys[i] & 0xffff0000u), total);
    }
    return total;
}

// Give back blocks of keys and values unread.
template <int v_slots>
__device__ __forceinline__ void pass(u32 full_k, u32 empty_k, u32 full_v, u32 empty_v, Place<2> &k_place,
                                     Place<v_slots> &v_place, int count) {
    for (; count > 0; --count, k_place.next(), v_place.next()) {
        barrier_wait(full_k + 8 * k_place.slot, k_place.parity);
        barrier_wait(full_v + 8 * v_place.slot, v_place.parity);
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(empty_k + 8 * k_place.slot);
            barrier_arrive(empty_v + 8 * v_place.slot);
        }
    }
}

// dq, and delta [H, N] = Σ out · dy for the kernel of the keys.
template <int E, bool extended, bool turns> __device__ __forceinline__ void backward_queries(const BackwardWork &work) {
    using Shared = QueriesShared<E>;
    constexpr int KB = Heads<E>::keys, v_slots = Shared::v_slots;
    constexpr u32 q_half = block_rows * 128, half = KB * 128, bytes = KB * E * 2;
    static_assert(sizeof(Shared) <= 2 * block_rows * E * 2 + (2 + v_slots) * bytes + 1024, "what a launch asks for");
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int role = __shfl_sync(~0u, threadIdx.x / warpgroup, 0);
    const u32 full_q = shared_address(&shared.full_q), full_dy = shared_address(&shared.full_dy),
              full_k = shared_address(shared.full_k), full_v = shared_address(shared.full_v),
              empty_k = shared_address(shared.empty_k), empty_v = shared_address(shared.empty_v);
    if (threadIdx.x == 0) {
        barrier_init(full_q, warpgroup);
        barrier_init(full_dy, warpgroup);
        for (int i = 0; i < 2; ++i) {
            barrier_init(full_k + 8 * i, warpgroup);
            barrier_init(empty_k + 8 * i, 8);
        }
        for (int i = 0; i < v_slots; ++i) {
            barrier_init(full_v + 8 * i, warpgroup);
            barrier_init(empty_v + 8 * i, 8);
        }
    }
    __syncthreads();
    const u32 q_tile = shared_address(shared.q), dy_tile = shared_address(shared.dy),
              k_tile = shared_address(shared.k), v_tile = shared_address(shared.v);
    const int tokens = work.tokens;
    const Item here(blockIdx.x, gridDim.x / work.heads, work.heads);
    Seen<KB, extended> seen(here.tile, role - 1);
    const u16 *const q = work.q + here.head * E, *const out = work.out + here.head * E,
                     *const dy = work.dy + here.head * E;
    Place<2> place;
    Place<v_slots> v_place;
    if (role == 0) {
        registers_down<copier_registers>();
        const u16 *const k = work.k + here.head / work.group * E, *const v = work.v + here.head / work.group * E;
        copy_rows<block_rows, E>(q_tile, q, work.q_row, seen.first, 0, tokens);
        arrive_with_copies(full_q);
        int blocks = 1, begin = 0;
        for (int n = 0; n < blocks; ++n, place.next(), v_place.next()) {
            barrier_wait(empty_k + 8 * place.slot, place.parity ^ 1);
            copy_rows<KB, E>(k_tile + place.slot * bytes, k, work.k_row, seen.first_key(n), begin, tokens);
            arrive_with_copies(full_k + 8 * place.slot);
            if (n == 0) {
                copy_rows<block_rows, E>(dy_tile, dy, work.dy_row, seen.first, 0, tokens);
                arrive_with_copies(full_dy);
            }
            barrier_wait(empty_v + 8 * v_place.slot, v_place.parity ^ 1);
            copy_rows<KB, E>(v_tile + v_place.slot * bytes, v, work.v_row, seen.first_key(n), begin, tokens);
            arrive_with_copies(full_v + 8 * v_place.slot);
            if (n == 0) {
                // The first copies need not know where documents begin.
                seen.find(work.cu_seqlens, work.borders, tokens, work.window);
                blocks = seen.blocks();
                begin = seen.begin;
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else {
        registers_up<worker_registers>();
        const int worker = role - 1, lane = threadIdx.x % 32;
        const long long of_head = static_cast<long long>(here.head) * tokens;
        if (turns && worker == 1) give_turn(worker);
        float deltas[2];
        {
            // Two threads a row, of the warp that has the row in its accumulators.
            const int row = seen.own_first + threadIdx.x % warpgroup / 2;
            float total = 0.0f;
            if (row < tokens) {
                const uint4 *ours = reinterpret_cast<const uint4 *>(out + row * work.out_row) + lane % 2 * (E / 16);
                const uint4 *theirs = reinterpret_cast<const uint4 *>(dy + row * work.dy_row) + lane % 2 * (E / 16);
#pragma unroll
                for (int i = 0; i < E / 16; ++i) total += dot(__ldg(ours + i), __ldg(theirs + i));
            }
            total += __shfl_xor_sync(~0u, total, 1);
            if (lane % 2 == 0 && row < tokens) work.delta[of_head + row] = total;
            deltas[0] = __shfl_sync(~0u, total, lane / 4 * 2);
            deltas[1] = __shfl_sync(~0u, total, lane / 4 * 2 + 16);
        }
        const float lses[2] = {seen.row < tokens ? work.lse[of_head + seen.row] : 0.0f,
                               seen.row + 8 < tokens ? work.lse[of_head + seen.row + 8] : 0.0f};
        seen.find(work.cu_seqlens, work.borders, tokens, work.window);
        const int blocks = seen.blocks(), own_blocks = seen.own_blocks(), skip = KB < block_rows ? seen.skip() : 0;
        const u64 q_operand = by_columns(q_tile + worker * half_rows * 128),
                  dy_operand = by_columns(dy_tile + worker * half_rows * 128);
        Wide<E> sums;
        float s[KB / 2], dp[KB / 2];
        u32 ds[KB / 16][4];
        clear(sums);
        barrier_wait(full_q, 0);
        if (KB < block_rows) {
            pass(full_k, empty_k, full_v, empty_v, place, v_place, skip);
            if (turns && skip > 0) {
                take_turn(worker);
                give_turn(worker);
            }
        }
        for (int n = skip; n < own_blocks; ++n, place.next(), v_place.next()) {
            const int first = seen.first_key(n);
            const u32 k_block = k_tile + place.slot * bytes, v_block = v_tile + v_place.slot * bytes;
            if (turns) take_turn(worker);
            barrier_wait(full_k + 8 * place.slot, place.parity);
            fence_shared();
            wgmma_fence();
            scores<E>(s, q_operand, q_half, by_columns(k_block), half);
            wgmma_commit();
            if (n == skip) barrier_wait(full_dy, 0);
            barrier_wait(full_v + 8 * v_place.slot, v_place.parity);
            fence_shared();
            // The block before is done with: its ds leaves the registers that dp needs.
            wgmma_wait<1>();
            if (n > skip && lane == 0) barrier_arrive(empty_k + 8 * (place.slot ^ 1));
            wgmma_fence();
            scores<E>(dp, dy_operand, q_half, by_columns(v_block), half);
            wgmma_commit();
            if (turns) give_turn(worker);
            wgmma_wait<1>();
            settled(s);
#pragma unroll
            for (int i = 0; i < KB / 2; ++i) s[i] = exp2_fast(fmaf(s[i], work.factor, -lses[i % 4 / 2]));
            wgmma_wait<0>();
            settled(dp);
            if (lane == 0) barrier_arrive(empty_v + 8 * v_place.slot);
#pragma unroll
            for (int i = 0; i < KB / 2; ++i) s[i] *= dp[i] - deltas[i % 4 / 2];
            if (seen.masked(first)) {
#pragma unroll
                for (int i = 0; i < KB / 2; ++i) s[i] = seen.sees(i, first) ? s[i] : 0.0f;
            }
            rounded(ds, s);
            wgmma_fence();
            product_add(sums, ds, k_block, half);
            wgmma_commit();
        }
        wgmma_wait<0>();
        settled(sums);
        if (lane == 0) barrier_arrive(empty_k + 8 * (place.slot ^ 1));
        if (turns) {
            // One by one: the other warpgroup's turn may wait for a block that needs this one's slot.
            for (int n = own_blocks; n < blocks; ++n) {
                take_turn(worker);
                give_turn(worker);
                pass(full_k, empty_k, full_v, empty_v, place, v_place, 1);
            }
        } else {
            pass(full_k, empty_k, full_v, empty_v, place, v_place, blocks - own_blocks);
        }
        const long long row_stride = static_cast<long long>(work.heads) * E;
        store_rows<E>(sums, work.scale, shared.q + worker * half_rows * 128, q_half,
                      work.dq + seen.own_first * row_stride + here.head * E, row_stride, tokens - seen.own_first,
                      1 + worker);
    }
}

// The queries that see a tile of keys [first, last], and the ends of what sees a warpgroup's 64 keys from own_first on:
// its first key, its last, and the thread's two.
template <bool extended> struct Seers {
    int end, first_end, own_end, key_end, key8_end;
    __device__ __forceinline__ Seers(const int *cu_seqlens, int borders, int tokens, int window, int first, int last,
                                     int own_first, int key) {
        first_end = own_end = key_end = key8_end = tokens;
        const int own_last = min(own_first + half_rows - 1, last);
        const Documents documents(cu_seqlens, borders, tokens, first, last, [&](int border) {
            if (border > own_first) first_end = min(first_end, border);
            if (border > own_last) own_end = min(own_end, border);
            if (border > key) key_end = min(key_end, border);
            if (border > key + 8) key8_end = min(key8_end, border);
        });
        end = documents.end;
        first_end = min(first_end, end);
        own_end = min(own_end, end);
        key_end = min(key_end, end);
        key8_end = min(key8_end, end);
        if constexpr (extended) {
            end = min(end, last + window);
            first_end = min(first_end, own_first + window);
            own_end = min(own_end, own_last + window);
            key_end = min(key_end, key + window);
            key8_end = min(key8_end, key + 8 + window);
        }
    }
};

[[maybe_unused]] constexpr u32 small_half = half_rows * 128;  // bytes of a half of a tile of 64 rows

template <int E> struct KeysShared {
    static constexpr int keys = E > 128 ? half_rows : block_rows, stages = E > 128 ? 2 : 4;
    char k[keys * E * 2];
    char v[keys * E * 2];
    char q[stages][half_rows * E * 2];
    char dy[stages][half_rows * E * 2];
    float4 weights[E > 128 ? 8 : 1][E > 128 ? warpgroup : 1];  // from the warpgroup of dv to that of dk
    float lse[stages][half_rows];
    float delta[stages][half_rows];
    u64 full_k, full_v, full[stages], empty[stages], full_weights, empty_weights;
};

// The copier's work: keys and values once, then for each query head of the group its queries and their gradients.
template <int E>
__device__ __forceinline__ void copy_queries(const BackwardWork &work, KeysShared<E> &shared, int first, int end,
                                             int kv_head) {
    using Shared = KeysShared<E>;
    constexpr u32 bytes = half_rows * E * 2;
    const int thread = threadIdx.x, blocks = (end - first + half_rows - 1) / half_rows;
    const u32 full = shared_address(shared.full), empty = shared_address(shared.empty),
              q_tile = shared_address(shared.q), dy_tile = shared_address(shared.dy);
    Place<Shared::stages> place;
    for (int member = 0; member < work.group; ++member) {
        const int head = kv_head * work.group + member;
        const float *values = (thread < half_rows ? work.lse : work.delta) + static_cast<long long>(head) * work.tokens;
        float(*const values_to)[half_rows] = thread < half_rows ? shared.lse : shared.delta;
        for (int n = 0; n < blocks; ++n, place.next()) {
            const int row = first + n * half_rows, own_row = row + thread % half_rows;
            const float value = own_row < end ? __ldg(values + own_row) : 0.0f;
            barrier_wait(empty + 8 * place.slot, place.parity ^ 1);
            copy_rows<half_rows, E>(q_tile + place.slot * bytes, work.q + head * E, work.q_row, row, first, end);
            copy_rows<half_rows, E>(dy_tile + place.slot * bytes, work.dy + head * E, work.dy_row, row, first, end);
            arrive_with_copies(full + 8 * place.slot);
            values_to[place.slot][thread % half_rows] = value;
            barrier_arrive(full + 8 * place.slot);
            if (member == 0 && n == 0) {
                copy_rows<Shared::keys, E>(shared_address(shared.v), work.v + kv_head * E, work.v_row, first, 0,
                                           work.tokens);
                arrive_with_copies(shared_address(&shared.full_v));
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

template <int E> __device__ __forceinline__ void begin_keys(KeysShared<E> &shared) {
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&shared.full_k), warpgroup);
        barrier_init(shared_address(&shared.full_v), warpgroup);
        barrier_init(shared_address(&shared.full_weights), warpgroup);
        barrier_init(shared_address(&shared.empty_weights), warpgroup);
        for (int i = 0; i < KeysShared<E>::stages; ++i) {
            // Each copier twice: its copies, and a value that it stored.
            barrier_init(shared_address(shared.full + i), 2 * warpgroup);
            // Each worker: it has read the slot's lse and delta itself.
            barrier_init(shared_address(shared.empty + i), 2 * warpgroup);
        }
    }
    __syncthreads();
}

// Scores of keys [64] against queries [64] become weights; accumulators of one thread, 2 rows of keys.
__device__ __forceinline__ void weigh(float (&s)[32], const float *lse, float factor) {
    const float2 *lses = reinterpret_cast<const float2 *>(lse) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float2 l = lses[4 * j];
        s[4 * j] = exp2_fast(fmaf(s[4 * j], factor, -l.x));
        s[4 * j + 1] = exp2_fast(fmaf(s[4 * j + 1], factor, -l.y));
        s[4 * j + 2] = exp2_fast(fmaf(s[4 * j + 2], factor, -l.x));
        s[4 * j + 3] = exp2_fast(fmaf(s[4 * j + 3], factor, -l.y));
    }
}

// Weights become gradients of scores.
__device__ __forceinline__ void slope(float (&s)[32], const float (&dp)[32], const float *delta) {
    const float2 *deltas = reinterpret_cast<const float2 *>(delta) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float2 d = deltas[4 * j];
        s[4 * j] *= dp[4 * j] - d.x;
        s[4 * j + 1] *= dp[4 * j + 1] - d.y;
        s[4 * j + 2] *= dp[4 * j + 2] - d.x;
        s[4 * j + 3] *= dp[4 * j + 3] - d.y;
    }
}

// dk and dv of a tile of 128 keys, over the query heads that share them in their order.
template <int E, bool extended, bool turns> __device__ __forceinline__ void backward_keys(const BackwardWork &work) {
    using Shared = KeysShared<E>;
    constexpr int stages = Shared::stages;
    constexpr u32 bytes = half_rows * E * 2;
    static_assert(sizeof(Shared) <= 2 * block_rows * E * 2 + stages * (2 * bytes + 512) + 1024,
                  "what a launch asks for");
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int role = __shfl_sync(~0u, threadIdx.x / warpgroup, 0);
    const int kv_heads = work.heads / work.group, tiles = gridDim.x / kv_heads;
    // The tiles that the most queries see begin first.
    const Item here(blockIdx.x, tiles, kv_heads);
    const int first = (tiles - 1 - here.tile) * block_rows, kv_head = here.head;
    const int last = min(first + block_rows, work.tokens) - 1;
    begin_keys(shared);
    const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
    const u32 k_tile = shared_address(shared.k), v_tile = shared_address(shared.v), q_tile = shared_address(shared.q),
              dy_tile = shared_address(shared.dy);
    if (role == 0) {
        registers_down<copier_registers>();
        copy_rows<block_rows, E>(k_tile, work.k + kv_head * E, work.k_row, first, 0, work.tokens);
        arrive_with_copies(shared_address(&shared.full_k));
        const Seers<extended> seers(work.cu_seqlens, work.borders, work.tokens, work.window, first, last, first, first);
        copy_queries<E>(work, shared, first, seers.end, kv_head);
    } else {
        registers_up<worker_registers>();
        const int worker = role - 1, lane = threadIdx.x % 32;
        const int own_first = first + worker * half_rows;
        const int key = own_first + threadIdx.x % warpgroup / 32 * 16 + threadIdx.x % 32 / 4;
        if (turns && worker == 1) give_turn(worker);
        const Seers<extended> seers(work.cu_seqlens, work.borders, work.tokens, work.window, first, last, own_first,
                                    key);
        const int blocks = (seers.end - first + half_rows - 1) / half_rows;
        Wide<E> dks, dvs;
        float s[32], dp[32];
        u32 p[4][4], ds[4][4];
        clear(dks);
        clear(dvs);
        const u64 k_operand = by_columns(k_tile + worker * half_rows * 128),
                  v_operand = by_columns(v_tile + worker * half_rows * 128);
        barrier_wait(shared_address(&shared.full_k), 0);
        barrier_wait(shared_address(&shared.full_v), 0);
        Place<stages> place;
        int busy = -1;  // the slot that products in flight still read
        for (int member = 0; member < work.group; ++member) {
            for (int n = 0; n < blocks; ++n, place.next()) {
                const int rows = first + n * half_rows;
                if (turns) take_turn(worker);
                barrier_wait(full + 8 * place.slot, place.parity);
                if (rows + half_rows <= own_first || rows >= seers.own_end) {
                    // The copier may need the busy slot before this warpgroup multiplies again.
                    if (turns) give_turn(worker);
                    wgmma_wait<0>();
                    if (busy >= 0) barrier_arrive(empty + 8 * busy);
                    barrier_arrive(empty + 8 * place.slot);
                    busy = -1;
                    continue;
                }
                const u32 q_block = q_tile + place.slot * bytes, dy_block = dy_tile + place.slot * bytes;
                fence_shared();
                wgmma_fence();
                scores<E>(s, k_operand, big_half, by_columns(q_block), small_half);
                wgmma_commit();
                // The block before is done with: its p and ds leave the registers that dp needs.
                wgmma_wait<1>();
                if (busy >= 0) barrier_arrive(empty + 8 * busy);
                busy = place.slot;
                wgmma_fence();
                scores<E>(dp, v_operand, big_half, by_columns(dy_block), small_half);
                wgmma_commit();
                if (turns) give_turn(worker);
                wgmma_wait<1>();
                settled(s);
                weigh(s, shared.lse[place.slot], work.factor);
                const bool masked = rows < own_first + half_rows - 1 || rows + half_rows > seers.first_end;
                const auto seen = [&](int i) {
                    const int row = rows + i / 4 * 8 + lane % 4 * 2 + i % 2;
                    return i % 4 < 2 ? row >= key && row < seers.key_end : row >= key + 8 && row < seers.key8_end;
                };
                if (masked) {
#pragma unroll
                    for (int i = 0; i < 32; ++i) s[i] = seen(i) ? s[i] : 0.0f;
                }
                rounded(p, s);
                wgmma_wait<0>();
                settled(dp);
                slope(s, dp, shared.delta[place.slot]);
                if (masked) {
#pragma unroll
                    for (int i = 0; i < 32; ++i) s[i] = seen(i) ? s[i] : 0.0f;
                }
                rounded(ds, s);
                wgmma_fence();
                product_add(dvs, p, dy_block, small_half);
                wgmma_commit();
                product_add(dks, ds, q_block, small_half);
                wgmma_commit();
            }
        }
        wgmma_wait<0>();
        settled(dks);
        settled(dvs);
        const long long stride = static_cast<long long>(kv_heads) * E, to = own_first * stride + kv_head * E;
        store_rows<E>(dks, work.scale, shared.k + worker * half_rows * 128, big_half, work.dk + to, stride,
                      work.tokens - own_first, 1 + worker);
        store_rows<E>(dvs, 1.0f, shared.v + worker * half_rows * 128, big_half, work.dv + to, stride,
                      work.tokens - own_first, 1 + worker);
    }
}

// The same of a tile of 64 keys with heads of 256 features.
template <int E, bool extended> __device__ __forceinline__ void backward_keys_wide(const BackwardWork &work) {
    using Shared = KeysShared<E>;
    constexpr int stages = Shared::stages;
    constexpr u32 bytes = half_rows * E * 2;
    static_assert(sizeof(Shared) <= 2 * bytes + stages * (2 * bytes + 512) + 16384 + 1024, "what a launch asks for");
    extern __shared__ __align__(1024) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int role = __shfl_sync(~0u, threadIdx.x / warpgroup, 0);
    const int kv_heads = work.heads / work.group, tiles = gridDim.x / kv_heads;
    const Item here(blockIdx.x, tiles, kv_heads);
    const int first = (tiles - 1 - here.tile) * half_rows, kv_head = here.head;
    const int last = min(first + half_rows, work.tokens) - 1;
    begin_keys(shared);
    const u32 full = shared_address(shared.full), empty = shared_address(shared.empty);
    const u32 k_tile = shared_address(shared.k), v_tile = shared_address(shared.v), q_tile = shared_address(shared.q),
              dy_tile = shared_address(shared.dy), full_weights = shared_address(&shared.full_weights),
              empty_weights = shared_address(&shared.empty_weights);
    if (role == 0) {
        registers_down<copier_registers>();
        copy_rows<half_rows, E>(k_tile, work.k + kv_head * E, work.k_row, first, 0, work.tokens);
        arrive_with_copies(shared_address(&shared.full_k));
        const Seers<extended> seers(work.cu_seqlens, work.borders, work.tokens, work.window, first, last, first, first);
        copy_queries<E>(work, shared, first, seers.end, kv_head);
    } else {
        registers_up<worker_registers>();
        const bool values = role == 1;  // this warpgroup has dv, the other dk
        const int thread = threadIdx.x % warpgroup, lane = threadIdx.x % 32;
        const int key = first + thread / 32 * 16 + lane / 4;
        const Seers<extended> seers(work.cu_seqlens, work.borders, work.tokens, work.window, first, last, first, key);
        const int blocks = (seers.end - first + half_rows - 1) / half_rows;
        const u64 operand = by_columns(values ? k_tile : v_tile);
        const u32 left = values ? q_tile : dy_tile, right = values ? dy_tile : q_tile;
        Wide<E> sums;
        float s[32];
        u32 rounded_s[4][4];
        clear(sums);
        barrier_wait(values ? shared_address(&shared.full_k) : shared_address(&shared.full_v), 0);
        Place<stages> place;
        u32 parity = 0;
        int busy = -1;  // the slot that products in flight still read
        for (int member = 0; member < work.group; ++member) {
            for (int n = 0; n < blocks; ++n, place.next(), parity ^= 1) {
                const int rows = first + n * half_rows;
                barrier_wait(full + 8 * place.slot, place.parity);
                fence_shared();
                wgmma_fence();
                scores<E>(s, operand, small_half, by_columns(left + place.slot * bytes), small_half);
                wgmma_commit();
                wgmma_wait<1>();
                if (busy >= 0) barrier_arrive(empty + 8 * busy);
                busy = place.slot;
                wgmma_wait<0>();
                settled(s);
                const bool masked = rows < first + half_rows - 1 || rows + half_rows > seers.first_end;
                const auto seen = [&](int i) {
                    const int row = rows + i / 4 * 8 + lane % 4 * 2 + i % 2;
                    return i % 4 < 2 ? row >= key && row < seers.key_end : row >= key + 8 && row < seers.key8_end;
                };
                if (values) {
                    weigh(s, shared.lse[place.slot], work.factor);
                    barrier_wait(empty_weights, parity ^ 1);
#pragma unroll
                    for (int j = 0; j < 8; ++j)
                        shared.weights[j][thread] = make_float4(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
                    barrier_arrive(full_weights);
                } else {
                    const float2 *deltas = reinterpret_cast<const float2 *>(shared.delta[place.slot]) + lane % 4;
                    barrier_wait(full_weights, parity);
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        const float4 w = shared.weights[j][thread];
                        const float2 d = deltas[4 * j];
                        s[4 * j] = w.x * (s[4 * j] - d.x);
                        s[4 * j + 1] = w.y * (s[4 * j + 1] - d.y);
                        s[4 * j + 2] = w.z * (s[4 * j + 2] - d.x);
                        s[4 * j + 3] = w.w * (s[4 * j + 3] - d.y);
                    }
                    barrier_arrive(empty_weights);
                }
                if (masked) {
#pragma unroll
                    for (int i = 0; i < 32; ++i) s[i] = seen(i) ? s[i] : 0.0f;
                }
                rounded(rounded_s, s);
                wgmma_fence();
                product_add(sums, rounded_s, right + place.slot * bytes, small_half);
                wgmma_commit();
            }
        }
        wgmma_wait<0>();
        settled(sums);
        // The other warpgroup may still multiply by its operand, so each stores through its own.
        const long long stride = static_cast<long long>(kv_heads) * E, to = first * stride + kv_head * E;
        store_rows<E>(sums, values ? 1.0f : work.scale, values ? shared.k : shared.v, small_half,
                      (values ? work.dv : work.dk) + to, stride, work.tokens - first, role);
    }
}

// The sinks' gradient [H]: minus the sum over tokens of a sink's weight times delta, in one order.
__device__ __forceinline__ void backward_sinks(const float *sinks, const float *lse, const float *delta, float *dsinks,
                                               int tokens) {
    __shared__ float sums[32];
    const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float sink = sinks[head] * 1.4426950408889634f;
    const long long of_head = static_cast<long long>(head) * tokens;
    float total = 0.0f;
    for (int n = threadIdx.x; n < tokens; n += blockDim.x) total += exp2f(sink - lse[of_head + n]) * delta[of_head + n];
#pragma unroll
    for (int far = 16; far; far /= 2) total += __shfl_xor_sync(~0u, total, far);
    if (lane == 0) sums[warp] = total;
    __syncthreads();
    if (warp == 0) {
        total = lane < blockDim.x / 32 ? sums[lane] : 0.0f;
#pragma unroll
        for (int far = 16; far; far /= 2) total += __shfl_xor_sync(~0u, total, far);
        if (lane == 0) dsinks[head] = -total;
    }
}

}  // namespace surogate

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SUROGATE_BACKWARD_BODY(FUNCTION, ...)                                                                          \
    surogate::FUNCTION<__VA_ARGS__>({q, q_row, k, k_row, v, v_row, out, out_row, dy, dy_row, lse, delta, dq, dk, dv,   \
                                     cu_seqlens, borders, tokens, heads, group, scale, factor, window})
#else
#define SUROGATE_BACKWARD_BODY(FUNCTION, ...)
#endif
#define SUROGATE_BACKWARD(NAME, FUNCTION, ...)                                                                         \
    extern "C" __global__ void __launch_bounds__(surogate::threads, 1) NAME(                                           \
        const surogate::u16 *q, long long q_row, const surogate::u16 *k, long long k_row, const surogate::u16 *v,      \
        long long v_row, const surogate::u16 *out, long long out_row, const surogate::u16 *dy, long long dy_row,       \
        const float *lse, float *delta, surogate::u16 *dq, surogate::u16 *dk, surogate::u16 *dv,                       \
        const int *cu_seqlens, int borders, int tokens, int heads, int group, float scale, float factor, int window) { \
        SUROGATE_BACKWARD_BODY(FUNCTION, __VA_ARGS__);                                                                 \
    }
#define SUROGATE_BACKWARD_SINKS(NAME)                                                                                  \
    extern "C" __global__ void __launch_bounds__(512) NAME(const float *sinks, const float *lse, const float *delta,   \
                                                           float *dsinks, int tokens) {                                \
        surogate::backward_sinks(sinks, lse, delta, dsinks, tokens);                                                   \
    }
