// Attention backward on Hopper, in two kernels: one has the queries' gradient, one the keys' and values'.
//
// Each computes the scores for itself: seven products where five would do, but nothing is added up between blocks, and
// neither weights nor gradients of scores leave the registers. Products take them from there; where keys are the rows of
// the result, the scores are computed transposed.

#include "attention_sm90.cuh"

namespace surogate {

struct QueriesShared {
    char q[big_tile];
    char dy[big_tile];
    char k[2][big_tile];
    char v[2][big_tile];
    u64 full_q, full_dy, full_k[2], full_v[2], empty_k[2], empty_v[2];
};
static_assert(sizeof(QueriesShared) <= 6 * big_tile + 1024, "what a launch asks for");

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

// dq, and delta [H, N] = Σ out · dy for the kernel of the keys.
__device__ void backward_queries(const u16 *q, long long q_row, const u16 *k, long long k_row, const u16 *v,
                                 long long v_row, const u16 *out, long long out_row, const u16 *dy, long long dy_row,
                                 const float *lse, float *delta, u16 *dq, const int *cu_seqlens, int borders,
                                 int tokens, int heads, int group, float scale, float factor) {
    extern __shared__ __align__(1024) char memory[];
    QueriesShared &shared = *reinterpret_cast<QueriesShared *>(memory);
    const int role = __shfl_sync(~0u, threadIdx.x / warpgroup, 0);
    const u32 full_q = shared_address(&shared.full_q), full_dy = shared_address(&shared.full_dy),
              full_k = shared_address(shared.full_k), full_v = shared_address(shared.full_v),
              empty_k = shared_address(shared.empty_k), empty_v = shared_address(shared.empty_v);
    if (threadIdx.x == 0) {
        barrier_init(full_q, warpgroup);
        barrier_init(full_dy, warpgroup);
        for (int i = 0; i < 2; ++i) {
            barrier_init(full_k + 8 * i, warpgroup);
            barrier_init(full_v + 8 * i, warpgroup);
            barrier_init(empty_k + 8 * i, 8);
            barrier_init(empty_v + 8 * i, 8);
        }
    }
    __syncthreads();
    const u32 q_tile = shared_address(shared.q), dy_tile = shared_address(shared.dy),
              k_tile = shared_address(shared.k), v_tile = shared_address(shared.v);
    Queries queries(heads, role - 1);
    q += queries.head * features;
    out += queries.head * features;
    dy += queries.head * features;
    if (role == 0) {
        registers_down<copier_registers>();
        k += queries.head / group * features;
        v += queries.head / group * features;
        // The first copies need not know where documents begin.
        copy_tile<block_rows>(q_tile, q, q_row, queries.first, 0, tokens);
        arrive_with_copies(full_q);
        copy_tile<block_rows>(k_tile, k, k_row, queries.first, 0, tokens);
        arrive_with_copies(full_k);
        copy_tile<block_rows>(dy_tile, dy, dy_row, queries.first, 0, tokens);
        arrive_with_copies(full_dy);
        copy_tile<block_rows>(v_tile, v, v_row, queries.first, 0, tokens);
        arrive_with_copies(full_v);
        queries.find(cu_seqlens, borders, tokens);
        copy_keys(queries, tokens, k, k_row, v, v_row, k_tile, v_tile, full_k, empty_k, full_v, empty_v);
    } else {
        registers_up<worker_registers>();
        Place<2> place;
        const int worker = role - 1, lane = threadIdx.x % 32;
        const long long of_head = static_cast<long long>(queries.head) * tokens;
        float deltas[2];
        {
            // Two threads a row, of the warp that has the row in its accumulators.
            const int row = queries.own_first + threadIdx.x % warpgroup / 2;
            float total = 0.0f;
            if (row < tokens) {
                const uint4 *ours = reinterpret_cast<const uint4 *>(out + row * out_row) + lane % 2 * 8;
                const uint4 *theirs = reinterpret_cast<const uint4 *>(dy + row * dy_row) + lane % 2 * 8;
#pragma unroll
                for (int i = 0; i < 8; ++i) total += dot(__ldg(ours + i), __ldg(theirs + i));
            }
            total += __shfl_xor_sync(~0u, total, 1);
            if (lane % 2 == 0 && row < tokens) delta[of_head + row] = total;
            deltas[0] = __shfl_sync(~0u, total, lane / 4 * 2);
            deltas[1] = __shfl_sync(~0u, total, lane / 4 * 2 + 16);
        }
        const float lses[2] = {queries.row < tokens ? lse[of_head + queries.row] : 0.0f,
                               queries.row + 8 < tokens ? lse[of_head + queries.row + 8] : 0.0f};
        queries.find(cu_seqlens, borders, tokens);
        const int blocks = queries.blocks(), own_blocks = queries.own_blocks();
        const u64 q_operand = by_columns(q_tile + worker * half_rows * 128),
                  dy_operand = by_columns(dy_tile + worker * half_rows * 128);
        float sums[64], s[64], dp[64];
        u32 ds[8][4];
        clear(sums);
        barrier_wait(full_q, 0);
        for (int n = 0; n < own_blocks; ++n, place.next()) {
            const int first = (queries.tile - n) * block_rows;
            const u32 k_block = k_tile + place.slot * big_tile, v_block = v_tile + place.slot * big_tile;
            barrier_wait(full_k + 8 * place.slot, place.parity);
            fence_shared();
            wgmma_fence();
            product(s, q_operand, big_half, by_columns(k_block), big_half);
            wgmma_commit();
            if (n == 0) barrier_wait(full_dy, 0);
            barrier_wait(full_v + 8 * place.slot, place.parity);
            fence_shared();
            // The block before is done with: its ds leaves the registers that dp needs.
            wgmma_wait<1>();
            if (n > 0 && lane == 0) barrier_arrive(empty_k + 8 * (place.slot ^ 1));
            wgmma_fence();
            product(dp, dy_operand, big_half, by_columns(v_block), big_half);
            wgmma_commit();
            wgmma_wait<1>();
            settled(s);
#pragma unroll
            for (int i = 0; i < 64; ++i) s[i] = exp2_fast(fmaf(s[i], factor, -lses[i % 4 / 2]));
            wgmma_wait<0>();
            settled(dp);
            if (lane == 0) barrier_arrive(empty_v + 8 * place.slot);
#pragma unroll
            for (int i = 0; i < 64; ++i) s[i] *= dp[i] - deltas[i % 4 / 2];
            if (queries.masked(first)) {
#pragma unroll
                for (int i = 0; i < 64; ++i) s[i] = queries.sees(i, first) ? s[i] : 0.0f;
            }
            rounded(ds, s);
            wgmma_fence();
            product_add(sums, ds, by_rows(k_block, big_half));
            wgmma_commit();
        }
        wgmma_wait<0>();
        settled(sums);
        if (lane == 0) barrier_arrive(empty_k + 8 * (place.slot ^ 1));
        pass(full_k, empty_k, full_v, empty_v, place, blocks - own_blocks);
        const long long row_stride = static_cast<long long>(heads) * features;
        store_block(sums, scale, shared.q + worker * half_rows * 128, big_half,
                    dq + queries.own_first * row_stride + queries.head * features, row_stride,
                    tokens - queries.own_first, 1 + worker);
    }
}

constexpr int stages = 4;
constexpr u32 small_half = half_rows * 128;  // bytes of a half of a tile of 64 rows
constexpr u32 small_tile = 2 * small_half;

struct KeysShared {
    char k[big_tile];
    char v[big_tile];
    char q[stages][small_tile];
    char dy[stages][small_tile];
    float lse[stages][half_rows];
    float delta[stages][half_rows];
    u64 full_k, full_v, full[stages], empty[stages];
};
static_assert(sizeof(KeysShared) <= 6 * big_tile + stages * 2 * half_rows * 4 + 1024, "what a launch asks for");

// dk and dv of a block of keys, over the query heads that share them in their order.
__device__ void backward_keys(const u16 *q, long long q_row, const u16 *k, long long k_row, const u16 *v,
                              long long v_row, const u16 *dy, long long dy_row, const float *lse, const float *delta,
                              u16 *dk, u16 *dv, const int *cu_seqlens, int borders, int tokens, int kv_heads,
                              int group, float scale, float factor) {
    extern __shared__ __align__(1024) char memory[];
    KeysShared &shared = *reinterpret_cast<KeysShared *>(memory);
    const int role = __shfl_sync(~0u, threadIdx.x / warpgroup, 0);
    const int first = blockIdx.x / kv_heads * block_rows, kv_head = blockIdx.x % kv_heads;
    const int last = min(first + block_rows, tokens) - 1;
    const u32 full_k = shared_address(&shared.full_k), full_v = shared_address(&shared.full_v),
              full = shared_address(shared.full), empty = shared_address(shared.empty);
    if (threadIdx.x == 0) {
        barrier_init(full_k, warpgroup);
        barrier_init(full_v, warpgroup);
        for (int i = 0; i < stages; ++i) {
            barrier_init(full + 8 * i, 2 * warpgroup);  // each copier twice: its copies, and a value that it stored
            barrier_init(empty + 8 * i, 2 * warpgroup);  // each worker: it has read the slot's lse and delta itself
        }
    }
    __syncthreads();
    const u32 k_tile = shared_address(shared.k), v_tile = shared_address(shared.v), q_tile = shared_address(shared.q),
              dy_tile = shared_address(shared.dy);
    if (role == 0) {
        registers_down<copier_registers>();
        const int thread = threadIdx.x;
        copy_tile<block_rows>(k_tile, k + kv_head * features, k_row, first, 0, tokens);
        arrive_with_copies(full_k);
        const int end = Documents(cu_seqlens, borders, tokens, first, last, [](int) {}).end;
        const int blocks = (end - first + half_rows - 1) / half_rows;
        Place<stages> place;
        for (int member = 0; member < group; ++member) {
            const int head = kv_head * group + member;
            const float *values = (thread < half_rows ? lse : delta) + static_cast<long long>(head) * tokens;
            float(*const values_to)[half_rows] = thread < half_rows ? shared.lse : shared.delta;
            for (int n = 0; n < blocks; ++n, place.next()) {
                const int row = first + n * half_rows, own_row = row + thread % half_rows;
                const float value = own_row < end ? __ldg(values + own_row) : 0.0f;
                barrier_wait(empty + 8 * place.slot, place.parity ^ 1);
                copy_tile<half_rows>(q_tile + place.slot * small_tile, q + head * features, q_row, row, first, end);
                copy_tile<half_rows>(dy_tile + place.slot * small_tile, dy + head * features, dy_row, row, first, end);
                arrive_with_copies(full + 8 * place.slot);
                values_to[place.slot][thread % half_rows] = value;
                barrier_arrive(full + 8 * place.slot);
                if (member == 0 && n == 0) {
                    copy_tile<block_rows>(v_tile, v + kv_head * features, v_row, first, 0, tokens);
                    arrive_with_copies(full_v);
                }
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else {
        registers_up<worker_registers>();
        const int worker = role - 1, lane = threadIdx.x % 32;
        const int own_first = first + worker * half_rows;
        const int key = own_first + threadIdx.x % warpgroup / 32 * 16 + threadIdx.x % 32 / 4;
        const int own_last = min(own_first + half_rows - 1, last);
        // Where the documents of the warpgroup's first and last keys end, and of the thread's two.
        int first_end = tokens, own_end = tokens, key_end = tokens, key8_end = tokens;
        const Documents documents(cu_seqlens, borders, tokens, first, last, [&](int border) {
            if (border > own_first) first_end = min(first_end, border);
            if (border > own_last) own_end = min(own_end, border);
            if (border > key) key_end = min(key_end, border);
            if (border > key + 8) key8_end = min(key8_end, border);
        });
        const int end = documents.end;
        first_end = min(first_end, end);
        own_end = min(own_end, end);
        key_end = min(key_end, end);
        key8_end = min(key8_end, end);
        const int blocks = (end - first + half_rows - 1) / half_rows;
        float dks[64], dvs[64], s[32], dp[32];
        u32 p[4][4], ds[4][4];
        clear(dks);
        clear(dvs);
        const u64 k_operand = by_columns(k_tile + worker * half_rows * 128),
                  v_operand = by_columns(v_tile + worker * half_rows * 128);
        barrier_wait(full_k, 0);
        barrier_wait(full_v, 0);
        Place<stages> place;
        int busy = -1;  // the slot that products in flight still read
        for (int member = 0; member < group; ++member) {
            for (int n = 0; n < blocks; ++n, place.next()) {
                const int rows = first + n * half_rows;
                barrier_wait(full + 8 * place.slot, place.parity);
                if (rows + half_rows <= own_first || rows >= own_end) {
                    // The copier may need the busy slot before this warpgroup multiplies again.
                    wgmma_wait<0>();
                    if (busy >= 0) barrier_arrive(empty + 8 * busy);
                    barrier_arrive(empty + 8 * place.slot);
                    busy = -1;
                    continue;
                }
                const u32 q_block = q_tile + place.slot * small_tile, dy_block = dy_tile + place.slot * small_tile;
                fence_shared();
                wgmma_fence();
                product(s, k_operand, big_half, by_columns(q_block), small_half);
                wgmma_commit();
                // The block before is done with: its p and ds leave the registers that dp needs.
                wgmma_wait<1>();
                if (busy >= 0) barrier_arrive(empty + 8 * busy);
                busy = place.slot;
                wgmma_fence();
                product(dp, v_operand, big_half, by_columns(dy_block), small_half);
                wgmma_commit();
                wgmma_wait<1>();
                settled(s);
                const float2 *lses = reinterpret_cast<const float2 *>(shared.lse[place.slot]) + lane % 4;
                const float2 *deltas = reinterpret_cast<const float2 *>(shared.delta[place.slot]) + lane % 4;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float2 l = lses[4 * j];
                    s[4 * j] = exp2_fast(fmaf(s[4 * j], factor, -l.x));
                    s[4 * j + 1] = exp2_fast(fmaf(s[4 * j + 1], factor, -l.y));
                    s[4 * j + 2] = exp2_fast(fmaf(s[4 * j + 2], factor, -l.x));
                    s[4 * j + 3] = exp2_fast(fmaf(s[4 * j + 3], factor, -l.y));
                }
                const bool masked = rows < own_first + half_rows - 1 || rows + half_rows > first_end;
                const auto seen = [&](int i) {
                    const int row = rows + i / 4 * 8 + lane % 4 * 2 + i % 2;
                    return i % 4 < 2 ? row >= key && row < key_end : row >= key + 8 && row < key8_end;
                };
                if (masked) {
#pragma unroll
                    for (int i = 0; i < 32; ++i) s[i] = seen(i) ? s[i] : 0.0f;
                }
                rounded(p, s);
                wgmma_wait<0>();
                settled(dp);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float2 d = deltas[4 * j];
                    s[4 * j] *= dp[4 * j] - d.x;
                    s[4 * j + 1] *= dp[4 * j + 1] - d.y;
                    s[4 * j + 2] *= dp[4 * j + 2] - d.x;
                    s[4 * j + 3] *= dp[4 * j + 3] - d.y;
                }
                if (masked) {
#pragma unroll
                    for (int i = 0; i < 32; ++i) s[i] = seen(i) ? s[i] : 0.0f;
                }
                rounded(ds, s);
                wgmma_fence();
                product_add(dvs, p, by_rows(dy_block, small_half));
                wgmma_commit();
                product_add(dks, ds, by_rows(q_block, small_half));
                wgmma_commit();
            }
        }
        wgmma_wait<0>();
        settled(dks);
        settled(dvs);
        const long long stride = static_cast<long long>(kv_heads) * features;
        const long long to = own_first * stride + kv_head * features;
        store_block(dks, scale, shared.k + worker * half_rows * 128, big_half, dk + to, stride, tokens - own_first,
                    1 + worker);
        store_block(dvs, 1.0f, shared.v + worker * half_rows * 128, big_half, dv + to, stride, tokens - own_first,
                    1 + worker);
    }
}

}  // namespace surogate

extern "C" __global__ void __launch_bounds__(surogate::threads, 1) attention_backward_queries(
    const surogate::u16 *q, long long q_row, const surogate::u16 *k, long long k_row, const surogate::u16 *v,
    long long v_row, const surogate::u16 *out, long long out_row, const surogate::u16 *dy, long long dy_row,
    const float *lse, float *delta, surogate::u16 *dq, const int *cu_seqlens, int borders, int tokens, int heads,
    int group, float scale, float factor) {
    SUROGATE_HOPPER(backward_queries(q, q_row, k, k_row, v, v_row, out, out_row, dy, dy_row, lse, delta, dq, cu_seqlens,
                                     borders, tokens, heads, group, scale, factor));
}

extern "C" __global__ void __launch_bounds__(surogate::threads, 1) attention_backward_keys(
    const surogate::u16 *q, long long q_row, const surogate::u16 *k, long long k_row, const surogate::u16 *v,
    long long v_row, const surogate::u16 *dy, long long dy_row, const float *lse, const float *delta,
    surogate::u16 *dk, surogate::u16 *dv, const int *cu_seqlens, int borders, int tokens, int kv_heads, int group,
    float scale, float factor) {
    SUROGATE_HOPPER(backward_keys(q, q_row, k, k_row, v, v_row, dy, dy_row, lse, delta, dk, dv, cu_seqlens, borders,
                                  tokens, kv_heads, group, scale, factor));
}
