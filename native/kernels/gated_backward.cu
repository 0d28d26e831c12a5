// The backward of h = silu(gate) · up in bf16, with the skinny products of LoRA that read the same values:
//
//     dgate, dup                          written side by side, dy [N, 2F]
//     parts of dy · (scale·B)             for du of gate and of up, rank 16 each
//     parts of uᵀ · dy and duᵀ · h        for dB of gate and up, and dA of the projection behind h
//
// A block has 256 features and a range of tokens, a warp 32 of the features, a step 16 of the tokens. A thread holds 8
// features in a row of two tokens, which is an operand of mma.m16n8k16 in an order of features that the other operand
// follows; transposed, by movmatrix, it is the right-hand operand of the products that run over tokens. Sums over warps go
// through shared memory in the order of the warps, sums over blocks are left as parts: equal inputs give equal bits.
//
// N tokens, F features, R = 16 ranks.

namespace surogate {

using u16 = unsigned short;
using u32 = unsigned int;

constexpr int ranks = 16;
constexpr int warps = 8;
constexpr int threads = 32 * warps;
constexpr int warp_features = 32;
constexpr int block_features = warps * warp_features;
constexpr int step = 16;

__device__ __forceinline__ u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }

__device__ __forceinline__ u32 transposed(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 tokens of [N, width], as 8 × 8 blocks: ranks 0-7 and 8-15 of tokens 0-7, then of 8-15; zeros past the tokens.
__device__ __forceinline__ void load_ranks(u32 (&a)[4], const u16 *matrix, int width, int first, int tokens) {
    const int lane = threadIdx.x % 32, row = first + lane / 4;
    const u16 *at = matrix + static_cast<long long>(row) * width + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool inside = row + i / 2 * 8 < tokens;
        a[i] = inside ? __ldg(reinterpret_cast<const u32 *>(at + i / 2 * 8 * width + i % 2 * 8)) : 0u;
    }
}

// Two rows of 8 features of each of three matrices.
struct Values {
    uint4 gate[2], up[2], dh[2];
};

__device__ __forceinline__ uint4 loaded(const u16 *at, bool inside) {
    return inside ? __ldg(reinterpret_cast<const uint4 *>(at)) : make_uint4(0, 0, 0, 0);
}

// d [16 ranks, 32 features] += aᵀ · x, x's pairs of features as two rows of a thread.
__device__ __forceinline__ void over_tokens(float (&d)[4][4], const u32 (&by_tokens)[4], const u32 (&x)[2][4]) {
    const u32 a[4] = {transposed(by_tokens[0]), transposed(by_tokens[1]), transposed(by_tokens[2]),
                      transposed(by_tokens[3])};
#pragma unroll
    for (int p = 0; p < 4; ++p) multiply_add(d[p], a, transposed(x[0][p]), transposed(x[1][p]));
}

// d [16 tokens, 16 ranks] += x · b over the warp's 32 features; b as fragments.
__device__ __forceinline__ void over_features(float (&d)[2][4], const u32 (&x)[2][4], const uint4 *b) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        const u32 a[4] = {x[0][2 * s], x[1][2 * s], x[0][2 * s + 1], x[1][2 * s + 1]};
        const uint4 right = b[s * 32];
        multiply_add(d[0], a, right.x, right.y);
        multiply_add(d[1], a, right.z, right.w);
    }
}

struct Shared {
    uint4 b[warps][2][2][32];                // of gate and up: fragments of two steps of features
    float du[2][warps][2][step][ranks + 4];  // twice, so that one wait a step is enough; padded against conflicts
};

}  // namespace surogate

extern "C" __global__ void __launch_bounds__(surogate::threads, 2)
    gated_backward(const surogate::u16 *dh, long long dh_row, const surogate::u16 *gate, long long gate_row,
                   const surogate::u16 *up, long long up_row, surogate::u16 *dy, long long dy_row,
                   const surogate::u16 *u, const surogate::u16 *b, long long b_row, const surogate::u16 *du_down,
                   float *du_parts, float *db_parts, float *da_parts, int tokens, int features, int rows) {
    using namespace surogate;
    extern __shared__ __align__(16) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int own = blockIdx.x * block_features + warp * warp_features;  // the warp's first feature
    const int column = own + lane % 4 * 8;                               // the thread's first
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
                float out[3][2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float g = e ? high(gates[p]) : low(gates[p]), v = e ? high(ups[p]) : low(ups[p]),
                                d = e ? high(dhs[p]) : low(dhs[p]);
                    const float sigmoid = __fdividef(1.0f, 1.0f + __expf(-g)), silu = g * sigmoid;
                    out[0][e] = d * v * (sigmoid + silu * (1.0f - sigmoid));
                    out[1][e] = d * silu;
                    out[2][e] = silu * v;
                }
                dgate[r][p] = pair(out[0][0], out[0][1]);
                dup[r][p] = pair(out[1][0], out[1][1]);
                h[r][p] = pair(out[2][0], out[2][1]);
            }
            const long long row = first + lane / 4 + 8 * r;
            if (row < end) {
                u16 *to = dy + row * dy_row + column;
                *reinterpret_cast<uint4 *>(to) = make_uint4(dgate[r][0], dgate[r][1], dgate[r][2], dgate[r][3]);
                *reinterpret_cast<uint4 *>(to + features) = make_uint4(dup[r][0], dup[r][1], dup[r][2], dup[r][3]);
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
                float *to = &shared.du[buffer][warp][which][lane / 4][n * 8 + lane % 4 * 2];
                *reinterpret_cast<float2 *>(to) = make_float2(du[n][0], du[n][1]);
                *reinterpret_cast<float2 *>(to + 8 * (ranks + 4)) = make_float2(du[n][2], du[n][3]);
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
}
