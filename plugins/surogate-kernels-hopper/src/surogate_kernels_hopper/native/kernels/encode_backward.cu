// What an adapted FP8 projection makes of its output's gradient, from one reading: e5m2 codes, the largest absolute value,
// and of LoRA of rank 16 the parts of
//
//     dy · (scale·B)     for du
//     uᵀ · dy            for dB
//
// A block has 256 outputs of one projection of a panel and a range of tokens, a warp 32 of the outputs, a step 32 of the
// tokens. Sums over warps go through shared memory in the order of the warps, sums over blocks are left as parts: equal
// inputs give equal bits.

#include "codes.cuh"
#include "skinny.cuh"

namespace surogate {

constexpr int warps = 8, threads = 32 * warps, warp_outputs = 32, block_outputs = warps * warp_outputs;
constexpr int step = 32, halves = step / 16;
constexpr int pitch = ranks + 4;

struct Shared {
    float du[2][warps][step][pitch];  // twice, so that one wait a step is enough; padded against conflicts
};

}  // namespace surogate

extern "C" __global__ void __launch_bounds__(surogate::threads, 2)
    encode_backward(const surogate::u16 *dy, long long dy_row, const surogate::u16 *u, const surogate::u16 *b,
                    int all_ranks, int e0, int e1, int e2, float *figures, unsigned char *codes, float *du_parts,
                    float *db_parts, int tokens, int outputs, int rows) {
    using namespace surogate;
    extern __shared__ __align__(16) char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_output = blockIdx.x * block_outputs;
    const int slot = (first_output >= e0) + (first_output >= e1) + (first_output >= e2);
    const int column = first_output + warp * warp_outputs + lane % 4 * 8;
    const int begin = blockIdx.y * rows, end = min(begin + rows, tokens);
    float *own_figures = figures + figures_of_one * slot;
    const float scale = __ldg(own_figures);
    u += slot * ranks;

    // B's fragments, in the order of outputs that the threads hold.
    uint4 right[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        u32 fragment[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u16 *at = b + static_cast<long long>(column + 4 * s + i % 2 * 2) * all_ranks + slot * ranks + lane / 4 +
                            i / 2 * 8;
            fragment[i] = at[0] | static_cast<u32>(at[all_ranks]) << 16;
        }
        right[s] = make_uint4(fragment[0], fragment[1], fragment[2], fragment[3]);
    }

    float db[4][4] = {};
    u32 most = 0;
    uint4 raw[2 * halves];
    u32 by_tokens[halves][4];
    const u16 *dy_at = dy + (begin + lane / 4) * dy_row + column;
    const u16 *u_at = u + static_cast<long long>(begin) * all_ranks;
    const auto load = [&](int first) {
#pragma unroll
        for (int r = 0; r < 2 * halves; ++r) raw[r] = loaded(dy_at + 8 * r * dy_row, first + lane / 4 + 8 * r < end);
        dy_at += step * dy_row;
    };
    const auto load_u = [&](int first) {
#pragma unroll
        for (int m = 0; m < halves; ++m) load_ranks(by_tokens[m], u_at, all_ranks, 16 * m, end - first);
        u_at += step * all_ranks;
    };
    // Tiles begin at multiples of 16 KiB of codes; a step is within one.
    static_assert(tile_rows % step == 0);
    unsigned char *codes_at = codes + place_of(begin + lane / 4, column, outputs);
    const long long over = static_cast<long long>(outputs - tile_columns) * tile_rows;
    load(begin);
    load_u(begin);
    int buffer = 0;
    for (int first = begin; first < end; first += step, buffer ^= 1) {
        u32 x[halves][2][4];
#pragma unroll
        for (int r = 0; r < 2 * halves; ++r) {
            u32(&own)[4] = x[r / 2][r % 2];
            own[0] = raw[r].x, own[1] = raw[r].y, own[2] = raw[r].z, own[3] = raw[r].w;
        }
        if (first + step < end) load(first + step);
#pragma unroll
        for (int r = 0; r < 2 * halves; ++r) {
            const u32(&own)[4] = x[r / 2][r % 2];
#pragma unroll
            for (int i = 0; i < 4; ++i) most = larger(most, own[i]);
            if (first + lane / 4 + 8 * r < end)
                *reinterpret_cast<uint2 *>(codes_at + 8 * r * tile_columns) = codes_of<true>(own, scale);
        }
        codes_at += step * tile_columns;
        if ((first + step) % tile_rows == 0) codes_at += over;
#pragma unroll
        for (int m = 0; m < halves; ++m) {
            over_tokens(db, by_tokens[m], x[m]);
            float du[2][4] = {};
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const u32 a[4] = {x[m][0][2 * s], x[m][1][2 * s], x[m][0][2 * s + 1], x[m][1][2 * s + 1]};
                multiply_add(du[0], a, right[s].x, right[s].y);
                multiply_add(du[1], a, right[s].z, right[s].w);
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float *to = &shared.du[buffer][warp][m * 16 + lane / 4][n * 8 + lane % 4 * 2];
                *reinterpret_cast<float2 *>(to) = make_float2(du[n][0], du[n][1]);
                *reinterpret_cast<float2 *>(to + 8 * pitch) = make_float2(du[n][2], du[n][3]);
            }
        }
        load_u(first + step);
        __syncthreads();
        // 32 tokens × 16 ranks: two a thread.
        const int token = threadIdx.x / 8, rank = threadIdx.x % 8 * 2;
        float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < warps; ++w) {
            const float2 share = *reinterpret_cast<const float2 *>(&shared.du[buffer][w][token][rank]);
            total.x += share.x;
            total.y += share.y;
        }
        if (first + token < end)
            *reinterpret_cast<float2 *>(
                du_parts + (static_cast<long long>(blockIdx.x) * tokens + first + token) * ranks + rank) = total;
    }
    enter_largest(most, own_figures);

    // Accumulators: ranks lane / 4 and 8 more, outputs column + 2p and the next.
    const long long part = blockIdx.y;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            db_parts[(part * outputs + column + 2 * p + i % 2) * ranks + lane / 4 + i / 2 * 8] = db[p][i];
    }
}
