// The backward of h = silu(gate) · up between FP8 projections, with the skinny products of LoRA that read the same values:
//
//     dgate, dup                          as e5m2 codes, side by side, in the tiles of codes.cuh
//     parts of dy · (scale·B)             for du of gate and of up, rank 16 each
//     parts of uᵀ · dy and duᵀ · h        for dB of gate and up, and dA of the projection behind h
//
// A block has 256 features and a range of tokens, a warp 32 of the features, a step 16 of the tokens. A thread holds 8
// features in a row of two tokens, which is an operand of mma.m16n8k16 in an order of features that the other operand
// follows; transposed, by movmatrix, it is the right-hand operand of the products that run over tokens. Sums over warps go
// through shared memory in the order of the warps, sums over blocks are left as parts: equal inputs give equal bits.
//
// N tokens, F features, R = 16 ranks.

#include "codes.cuh"
#include "skinny.cuh"

namespace surogate {

constexpr int warps = 8;
constexpr int threads = 32 * warps;
constexpr int warp_features = 32;
constexpr int block_features = warps * warp_features;
constexpr int step = 16;

// Two rows of 8 features of each of three matrices.
struct Values {
    uint4 gate[2], up[2], dh[2];
};

struct Shared {
    uint4 b[warps][2][2][32];                // of gate and up: fragments of two steps of features
    float du[2][warps][2][step][ranks + 4];  // twice, so that one wait a step is enough; padded against conflicts
};

// Element e of dgate, dup and h.
__device__ __forceinline__ void gradients_of(float g, float v, float d, float (&made)[3][2], int e) {
    const float sigmoid = __fdividef(1.0f, 1.0f + __expf(-g)), silu = g * sigmoid;
    made[0][e] = d * v * (sigmoid + silu * (1.0f - sigmoid));
    made[1][e] = d * silu;
    made[2][e] = silu * v;
}

// Where dgate and dup go: each half has figures of its own. A thread's rows are alike modulo 8.
struct Codes {
    unsigned char *codes;
    float *figures;
    int features;
    u32 most_gate = 0, most_up = 0;
    __device__ __forceinline__ Codes(unsigned char *codes, float *figures, int features, int column)
        : codes(codes + place_of(threadIdx.x % 32 / 4, column, 2 * features) - threadIdx.x % 32 / 4 * tile_columns),
          figures(figures), features(features) {}
    __device__ __forceinline__ void store(int row, const u32 (&dgate)[4], const u32 (&dup)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            most_gate = larger(most_gate, dgate[i]);
            most_up = larger(most_up, dup[i]);
        }
        const long long below = static_cast<long long>(row / tile_rows) * (2 * features - tile_rows) + row;
        unsigned char *to = codes + below * tile_columns;
        *reinterpret_cast<uint2 *>(to) = codes_of<true>(dgate, __ldg(figures));
        *reinterpret_cast<uint2 *>(to + features * tile_rows) = codes_of<true>(dup, __ldg(figures + figures_of_one));
    }
    __device__ __forceinline__ void finish() {
        enter_largest(most_gate, figures);
        enter_largest(most_up, figures + figures_of_one);
    }
};

}  // namespace surogate

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
#define SUROGATE_RESIDENT 2
#else
#define SUROGATE_RESIDENT 1  // elsewhere two would not have the registers, and nobody reads the codes
#endif

extern "C" __global__ void __launch_bounds__(surogate::threads, SUROGATE_RESIDENT)
    gated_codes(const surogate::u16 *dh, long long dh_row, const surogate::u16 *gate, long long gate_row,
                const surogate::u16 *up, long long up_row, unsigned char *codes, float *figures,
                const surogate::u16 *u, const surogate::u16 *b, long long b_row, const surogate::u16 *du_down,
                float *du_parts, float *db_parts, float *da_parts, int tokens, int features, int rows) {
    using namespace surogate;
    extern __shared__ __align__(16) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int own = blockIdx.x * block_features + warp * warp_features;  // the warp's first feature
    const int column = own + lane % 4 * 8;                               // the thread's first
    Codes out(codes, figures, features, column);
    const int begin = blockIdx.y * rows, end = min(begin + rows, tokens);

    // B's fragments, in the order of features that the threads hold: pairs 8q + 4s + {0, 1} and {2, 3}.
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            u32 fragment[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int feature = column + 4 * s + i % 2 * 2;
                const u16 *at = b + static_cast<long long>(which * features + feature) * b_row + which * ranks +
                                lane / 4 + i / 2 * 8;
                fragment[i] = at[0] | static_cast<u32>(at[b_row]) << 16;
            }
            shared.b[warp][which][s][lane] = make_uint4(fragment[0], fragment[1], fragment[2], fragment[3]);
        }
    }
    __syncwarp();

    float gate_db[4][4] = {}, up_db[4][4] = {}, down_da[4][4] = {};
    const auto load = [&](int first) {
        Values values;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const long long row = first + lane / 4 + 8 * r;
            const bool inside = row < end;
            values.gate[r] = loaded(gate + row * gate_row + column, inside);
            values.up[r] = loaded(up + row * up_row + column, inside);
            values.dh[r] = loaded(dh + row * dh_row + column, inside);
        }
        return values;
    };
    u32 gate_u[4], up_u[4], down_du[4];
    const auto load_all_ranks = [&](int first) {
        load_ranks(gate_u, u, 2 * ranks, first, end);
        load_ranks(up_u, u + ranks, 2 * ranks, first, end);
        load_ranks(down_du, du_down, ranks, first, end);
    };
    // Both are asked for again as soon as their registers are free, a step before they are needed.
    Values now = load(begin);
    load_all_ranks(begin);
    int buffer = 0;
    for (int first = begin; first < end; first += step, buffer ^= 1) {
        u32 dgate[2][4], dup[2][4], h[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 gates[4] = {now.gate[r].x, now.gate[r].y, now.gate[r].z, now.gate[r].w};
            const u32 ups[4] = {now.up[r].x, now.up[r].y, now.up[r].z, now.up[r].w};
            const u32 dhs[4] = {now.dh[r].x, now.dh[r].y, now.dh[r].z, now.dh[r].w};
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                float made[3][2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float g = e ? high_of(gates[p]) : low_of(gates[p]), v = e ? high_of(ups[p]) : low_of(ups[p]),
                                d = e ? high_of(dhs[p]) : low_of(dhs[p]);
                    gradients_of(g, v, d, made, e);
                }
                dgate[r][p] = pair(made[0][0], made[0][1]);
                dup[r][p] = pair(made[1][0], made[1][1]);
                h[r][p] = pair(made[2][0], made[2][1]);
            }
            const long long row = first + lane / 4 + 8 * r;
            if (row < end) {
                out.store(row, dgate[r], dup[r]);
            }
        }
        if (first + step < end) now = load(first + step);
        over_tokens(gate_db, gate_u, dgate);
        over_tokens(up_db, up_u, dup);
        over_tokens(down_da, down_du, h);
        load_all_ranks(first + step);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            float du[2][4] = {};
            over_features(du, which ? dup : dgate, &shared.b[warp][which][0][lane]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float *place = &shared.du[buffer][warp][which][lane / 4][n * 8 + lane % 4 * 2];
                *reinterpret_cast<float2 *>(place) = make_float2(du[n][0], du[n][1]);
                *reinterpret_cast<float2 *>(place + 8 * (ranks + 4)) = make_float2(du[n][2], du[n][3]);
            }
        }
        __syncthreads();
        // 2 × 16 tokens × 16 ranks: two a thread.
        const int which = threadIdx.x / 128, token = threadIdx.x % 128 / 8, rank = threadIdx.x % 8 * 2;
        float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < warps; ++w) {
            const float2 share = *reinterpret_cast<const float2 *>(&shared.du[buffer][w][which][token][rank]);
            total.x += share.x;
            total.y += share.y;
        }
        if (first + token < end) {
            const long long chunk = which * gridDim.x + blockIdx.x;
            *reinterpret_cast<float2 *>(du_parts + (chunk * tokens + first + token) * ranks + rank) = total;
        }
    }

    // Accumulators: ranks lane / 4 and 8 more, features column + 2p and the next.
    const long long part = blockIdx.y;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int feature = column + 2 * p + i % 2, rank = lane / 4 + i / 2 * 8;
            db_parts[(part * 2 * features + feature) * ranks + rank] = gate_db[p][i];
            db_parts[(part * 2 * features + features + feature) * ranks + rank] = up_db[p][i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
            *reinterpret_cast<float2 *>(da_parts + (part * ranks + lane / 4 + 8 * r) * features + column + 2 * p) =
                make_float2(down_da[p][2 * r], down_da[p][2 * r + 1]);
    }
    out.finish();
}

// The figures of dgate and dup before their codes are made: a block each. Only before there are scales they are computed
// to find the largest: that is one step of a run.
extern "C" __global__ void __launch_bounds__(1024)
    gated_codes_begin(const surogate::u16 *dh, long long dh_row, const surogate::u16 *gate, long long gate_row,
                const surogate::u16 *up, long long up_row, const float *r0, const float *r1, float limit, float factor,
                float *figures, int tokens, int features) {
    using namespace surogate;
    __shared__ u32 most;
    const bool second = blockIdx.x == 1;
    const float scale = (second ? r1 : r0)[2];
    float *own = figures + figures_of_one * blockIdx.x;
    if (scale > 0.0f) {
        if (threadIdx.x == 0) begin_figures(scale, 0.0f, limit, factor, own);
        return;
    }
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    u32 pairs = 0;
    for (long long i = threadIdx.x; i < static_cast<long long>(tokens) * (features / 2); i += 1024) {
        const long long row = i / (features / 2), column = i % (features / 2) * 2;
        const u32 gates = *reinterpret_cast<const u32 *>(gate + row * gate_row + column);
        const u32 ups = *reinterpret_cast<const u32 *>(up + row * up_row + column);
        const u32 dhs = *reinterpret_cast<const u32 *>(dh + row * dh_row + column);
        float made[3][2];
        gradients_of(low_of(gates), low_of(ups), low_of(dhs), made, 0);
        gradients_of(high_of(gates), high_of(ups), high_of(dhs), made, 1);
        pairs = larger(pairs, pair(second ? made[1][0] : made[0][0], second ? made[1][1] : made[0][1]));
    }
    const u32 above = pairs & 0xffff0000u, below = pairs << 16;
    atomicMax(&most, __reduce_max_sync(~0u, above > below ? above : below));
    __syncthreads();
    if (threadIdx.x == 0) begin_figures(0.0f, __uint_as_float(most), limit, factor, own);
}
