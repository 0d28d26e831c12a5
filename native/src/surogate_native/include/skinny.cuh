// The skinny products of LoRA of rank 16 with what a thread holds: 8 features in a row of two tokens, an operand of
// mma.m16n8k16 in an order of features that the other operand follows; transposed, by movmatrix, it is the right-hand
// operand of the products that run over tokens. A warp has 32 features.
#pragma once

namespace surogate {

using u16 = unsigned short;
using u32 = unsigned int;

constexpr int ranks = 16;

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

}  // namespace surogate
