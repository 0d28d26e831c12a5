// The backward of h = silu(gate) · up, with the skinny products of LoRA that read the same values:
//
//     dgate, dup                          for `Out` to write
//     parts of dy · (scale·B)             for du of gate and of up, rank 16 each
//     parts of uᵀ · dy and duᵀ · h        for dB of gate and up, and dA of the projection behind h
//
// A block has 256 features and a range of tokens, a warp 32 of the features, a step 16 of the tokens. A thread holds 8
// features in a row of two tokens, which is an operand of mma.m16n8k16 in an order of features that the other operand
// follows; transposed, by movmatrix, it is the right-hand operand of the products that run over tokens. Sums over warps go
// through shared memory in the order of the warps, sums over blocks are left as parts: equal inputs give equal bits.
//
// N tokens, F features, R = 16 ranks.
#pragma once
#include "bf16x2.cuh"
#include "skinny.cuh"

namespace surogate {

constexpr int warps = 8;
constexpr int threads = 32 * warps;
constexpr int warp_features = 32;
constexpr int block_features = warps * warp_features;
constexpr int step = 16;

__device__ __forceinline__ u32 shared_address(const void *pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory; zeros where `inside` is false, and then nothing is read.
__device__ __forceinline__ void copy16(u32 to, const void *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

template <int pending> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void load16(u32 (&to)[4], u32 from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// Ranks 0-7 and 8-15 of tokens 0-7, then of 8-15, each 8 × 8 transposed: the left operand of a sum over tokens.
__device__ __forceinline__ void load_ranks(u32 (&a)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(from)
                 : "memory");
}

// 1 / (1 + e^-x). Where the exponential is denormal the sum is 1 with it or without.
__device__ __forceinline__ float sigmoid_of(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950216293335f));
    return __fdividef(1.0f, 1.0f + power);
}

// Element e of dgate, dup and h.
__device__ __forceinline__ void gradients_of(float g, float v, float d, float (&made)[3][2], int e) {
    const float sigmoid = sigmoid_of(g), silu = g * sigmoid;
    made[0][e] = d * v * (sigmoid + silu * (1.0f - sigmoid));
    made[1][e] = d * silu;
    made[2][e] = silu * v;
}

// d [16 ranks, 32 features] += uᵀ · x: u [16 tokens, 16 ranks] in shared memory, x's pairs of features as two rows of a
// thread.
__device__ __forceinline__ void over_tokens(float (&d)[4][4], u32 ranks_at, const u32 (&x)[2][4]) {
    u32 a[4];
    load_ranks(a, ranks_at);
#pragma unroll
    for (int p = 0; p < 4; ++p) multiply_add(d[p], a, transposed(x[0][p]), transposed(x[1][p]));
}

constexpr int ranks_row = 7 * 16;  // bytes: 16 ranks each of gate, up and down, padded so that 8 rows have all banks
constexpr int ranks_tile = step * ranks_row;
constexpr int values_tile = 3 * 2 * threads * 16;  // two rows of 8 features a thread, of gate, up and dh

template <int stages> struct Shared {
    uint4 b[warps][2][2][32];                // of gate and up: fragments of two steps of features
    float du[2][warps][2][step][ranks + 4];  // twice, so that one wait a step is enough; padded against conflicts
    char rank_tiles[(stages + 1) * ranks_tile];
    char values[stages * values_tile];
};

struct Gated {
    const u16 *dh;
    long long dh_row;
    const u16 *gate;
    long long gate_row;
    const u16 *up;
    long long up_row;
    const u16 *u, *b;
    long long b_row;
    const u16 *du_down;
    float *du_parts, *db_parts, *da_parts;
    int tokens, features;
    int rows;  // of a block's tokens
};
#define SUROGATE_GATED_ARGUMENTS                                                                                       \
    const surogate::u16 *dh, long long dh_row, const surogate::u16 *gate, long long gate_row, const surogate::u16 *up, \
        long long up_row, const surogate::u16 *u, const surogate::u16 *b, long long b_row,                             \
        const surogate::u16 *du_down, float *du_parts, float *db_parts, float *da_parts, int tokens, int features,     \
        int rows
#define SUROGATE_GATED_OF                                                                                              \
    {dh, dh_row, gate, gate_row, up, up_row, u, b, b_row, du_down, du_parts, db_parts, da_parts, tokens, features, rows}

// Copies run `stages` steps ahead.
template <int stages, typename Out> __device__ __forceinline__ void gated(const Gated &of, Out &out) {
    extern __shared__ __align__(16) char memory[];
    Shared<stages> &shared = *reinterpret_cast<Shared<stages> *>(memory);
    const int features = of.features, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int own = blockIdx.x * block_features + warp * warp_features;  // the warp's first feature
    const int column = own + lane % 4 * 8;                               // the thread's first
    const int begin = blockIdx.y * of.rows, end = min(begin + of.rows, of.tokens);

    // B's fragments, in the order of features that the threads hold: pairs 8q + 4s + {0, 1} and {2, 3}.
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            u32 fragment[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int feature = column + 4 * s + i % 2 * 2;
                const u16 *at = of.b + static_cast<long long>(which * features + feature) * of.b_row + which * ranks +
                                lane / 4 + i / 2 * 8;
                fragment[i] = at[0] | static_cast<u32>(at[of.b_row]) << 16;
            }
            shared.b[warp][which][s][lane] = make_uint4(fragment[0], fragment[1], fragment[2], fragment[3]);
        }
    }
    __syncwarp();

    float gate_db[4][4] = {}, up_db[4][4] = {}, down_da[4][4] = {};
    // A thread reads the values that it copied itself; of the ranks, which all warps read, there is one tile more, as
    // a warp may be a step behind.
    const int own_row = begin + lane / 4;
    const char *gate_at = reinterpret_cast<const char *>(of.gate + own_row * of.gate_row + column);
    const char *up_at = reinterpret_cast<const char *>(of.up + own_row * of.up_row + column);
    const char *dh_at = reinterpret_cast<const char *>(of.dh + own_row * of.dh_row + column);
    out.begin(own_row, column, features);
    const u32 values_first = shared_address(shared.values) + threadIdx.x * 16,
              ranks_first = shared_address(shared.rank_tiles);
    const u32 rank_from = (lane % 8 + lane / 16 * 8) * ranks_row + lane / 8 % 2 * 16;
    const auto copy = [&](int first, u32 to_values, u32 to_ranks) {
        const bool inside[2] = {first + lane / 4 < end, first + lane / 4 + 8 < end};
        const u32 to = values_first + to_values;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            copy16(to + r * threads * 16, gate_at, inside[r]);
            copy16(to + (2 + r) * threads * 16, up_at, inside[r]);
            copy16(to + (4 + r) * threads * 16, dh_at, inside[r]);
            gate_at += step * of.gate_row;  // 8 rows
            up_at += step * of.up_row;
            dh_at += step * of.dh_row;
        }
        // A step's ranks lie together in both matrices: two warps copy u, one du of down.
        const int chunk = threadIdx.x % 64;
        if (threadIdx.x < 64)
            copy16(ranks_first + to_ranks + chunk / 4 * ranks_row + chunk % 4 * 16,
                   of.u + static_cast<long long>(first) * 2 * ranks + chunk * 8, first + chunk / 4 < end);
        else if (threadIdx.x < 96)
            copy16(ranks_first + to_ranks + chunk / 2 * ranks_row + chunk % 2 * 16 + 4 * ranks,
                   of.du_down + static_cast<long long>(first) * ranks + chunk * 8, first + chunk / 2 < end);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int i = 0; i < stages; ++i) copy(begin + i * step, i * values_tile, i * ranks_tile);
    wait_for_copies<stages - 1>();
    __syncthreads();
    u32 buffer = 0, slot = 0, ranks_slot = 0, ranks_before = stages * ranks_tile;
    // 2 × 16 tokens × 16 ranks of du: two a thread.
    const int du_which = threadIdx.x / 128, du_token = threadIdx.x % 128 / 8, du_rank = threadIdx.x % 8 * 2;
    u32 du_at = ((du_which * gridDim.x + blockIdx.x) * of.tokens + begin + du_token) * ranks + du_rank;
    constexpr u32 du_bytes = sizeof(shared.du[0]);
    char *const du_to = reinterpret_cast<char *>(&shared.du[0][warp][0][lane / 4][lane % 4 * 2]);
    const char *const du_from = reinterpret_cast<const char *>(&shared.du[0][0][du_which][du_token][du_rank]);
    for (int first = begin; first < end; first += step, buffer = du_bytes - buffer) {
        u32 dgate[2][4], dup[2][4], h[2][4];
        {
            u32 gates[2][4], ups[2][4], dhs[2][4];
            const u32 from = values_first + slot;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                load16(gates[r], from + r * threads * 16);
                load16(ups[r], from + (2 + r) * threads * 16);
                load16(dhs[r], from + (4 + r) * threads * 16);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
                for (int p = 0; p < 4; ++p) {
                    float made[3][2];
                    gradients_of(low_of(gates[r][p]), low_of(ups[r][p]), low_of(dhs[r][p]), made, 0);
                    gradients_of(high_of(gates[r][p]), high_of(ups[r][p]), high_of(dhs[r][p]), made, 1);
                    dgate[r][p] = bf16x2(made[0][0], made[0][1]);
                    dup[r][p] = bf16x2(made[1][0], made[1][1]);
                    h[r][p] = bf16x2(made[2][0], made[2][1]);
                }
                out.store(r, dgate[r], dup[r], first + lane / 4 + 8 * r < end);
            }
            out.next();
            // The slot has been read.
            copy(first + stages * step, slot, ranks_before);
            slot = stages == 2 ? values_tile - slot : 0;
        }
        const u32 ranks_at = ranks_first + ranks_slot + rank_from;
        over_tokens(gate_db, ranks_at, dgate);
        over_tokens(up_db, ranks_at + 2 * ranks, dup);
        over_tokens(down_da, ranks_at + 4 * ranks, h);
        ranks_before = ranks_slot;
        ranks_slot = ranks_slot == stages * ranks_tile ? 0 : ranks_slot + ranks_tile;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            float du[2][4] = {};
            over_features(du, which ? dup : dgate, &shared.b[warp][which][0][lane]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float *to = reinterpret_cast<float *>(du_to + buffer) + which * step * (ranks + 4) + n * 8;
                *reinterpret_cast<float2 *>(to) = make_float2(du[n][0], du[n][1]);
                *reinterpret_cast<float2 *>(to + 8 * (ranks + 4)) = make_float2(du[n][2], du[n][3]);
            }
        }
        wait_for_copies<stages - 1>();
        __syncthreads();
        float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < warps; ++w) {
            const float2 share = *reinterpret_cast<const float2 *>(du_from + buffer + w * sizeof(shared.du[0][0]));
            total.x += share.x;
            total.y += share.y;
        }
        if (first + du_token < end) *reinterpret_cast<float2 *>(of.du_parts + du_at) = total;
        du_at += step * ranks;
    }

    // Accumulators: ranks lane / 4 and 8 more, features column + 2p and the next.
    const long long part = blockIdx.y;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        float *db = of.db_parts + (part * 2 * features + column + 2 * p) * ranks + lane / 4;
        float *da = of.da_parts + (part * ranks + lane / 4) * features + column + 2 * p;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            db[i % 2 * ranks + i / 2 * 8] = gate_db[p][i];
            db[(features + i % 2) * ranks + i / 2 * 8] = up_db[p][i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
            *reinterpret_cast<float2 *>(da + 8 * r * features) = make_float2(down_da[p][2 * r], down_da[p][2 * r + 1]);
    }
}

}  // namespace surogate
