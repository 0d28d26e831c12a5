// Attention on Hopper for heads of E = 64, 128 or 256 features: tiles of any width, windows, the order of the work.
//
// Names: E features of a head, KB keys of a block. An `extended` kernel takes a window and sinks; the plain one is compiled
// without them. With a window a token sees itself and the window - 1 tokens before it in its document: it moves the
// bounds of the loops, and only blocks on its edge are masked.
#pragma once
#include "attention_sm90.cuh"

namespace surogate {

template <int E> struct Heads {
    static constexpr int keys = E > 128 ? 64 : 128;  // keys of a block of the kernels that go over keys
    static constexpr int parts = E > 128 ? E / 128 : 1, count = (E > 128 ? 128 : E) / 2;  // of accumulators [64, E]
    static constexpr u32 row = E * 2;  // bytes
};
template <int E> using Wide = float[Heads<E>::parts][Heads<E>::count];

__device__ __forceinline__ void multiply_add(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SUROGATE_D32
                 ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : SUROGATE_F32("+f", d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d = a · bᵀ over the E columns of two tiles whose halves are half_a and half_b bytes apart.
template <int E, int count> __device__ __forceinline__ void scores(float (&d)[count], u64 a, u32 half_a, u64 b, u32 half_b) {
    multiply(d, a, b);
#pragma unroll
    for (int s = 1; s < E / 16; ++s) multiply_add(d, column_step(a, s, half_a), column_step(b, s, half_b));
}

// d [64, E] += a · b, b a tile [16 · steps, E] summed over its rows.
template <int parts, int count, int steps>
__device__ __forceinline__ void product_add(float (&d)[parts][count], const u32 (&a)[steps][4], u32 tile, u32 half) {
#pragma unroll
    for (int s = 0; s < steps; ++s) {
#pragma unroll
        for (int part = 0; part < parts; ++part)
            multiply_add(d[part], a[s], row_step(by_rows(tile + part * 2 * half, half), s));
    }
}

template <int parts, int count> __device__ __forceinline__ void settled(float (&d)[parts][count]) {
#pragma unroll
    for (int part = 0; part < parts; ++part) settled(d[part]);
}
template <int parts, int count> __device__ __forceinline__ void clear(float (&d)[parts][count]) {
#pragma unroll
    for (int part = 0; part < parts; ++part) clear(d[part]);
}

// One warpgroup copies rows [first, first + rows) of a [N, E] matrix into a tile; zeros outside [begin, end).
template <int rows, int E>
__device__ __forceinline__ void copy_rows(u32 tile, const u16 *from, long long row_stride, int first, int begin,
                                          int end) {
    constexpr int chunks = E / 8, at_once = warpgroup / chunks;
    const int thread = threadIdx.x % warpgroup, chunk = thread % chunks, row = thread / chunks;
    const u32 to = tile + (chunk / 8) * (rows * 128) + row * 128;
    const u16 *source = from + (first + row) * row_stride + chunk * 8;
#pragma unroll 4
    for (int i = 0; i < rows / at_once; ++i) {
        const int token = first + row + at_once * i;
        copy16(to + i * at_once * 128 + ((chunk % 8) ^ ((row + at_once * i) % 8)) * 16, source + at_once * i * row_stride,
               token >= begin && token < end);
    }
}

// `store_block` for accumulators [64, E].
template <int E>
__device__ __forceinline__ void store_rows(const Wide<E> &d, float factor, char *tile, u32 half, u16 *to,
                                           long long row_stride, int rows, int name) {
    constexpr int chunks = E / 8, at_once = warpgroup / chunks, count = Heads<E>::count;
    const int thread = threadIdx.x % warpgroup, warp = thread / 32, lane = thread % 32;
    const int row = warp * 16 + lane / 4;
    warpgroup_sync(name);  // what was stored through the tile before has been read
#pragma unroll
    for (int part = 0; part < Heads<E>::parts; ++part) {
#pragma unroll
        for (int j = 0; j < count / 4; ++j) {
            // Rows row and row + 8 have the same swizzle.
            char *at = tile + (part * 2 + j / 8) * half + row * 128 + ((j % 8) ^ (row % 8)) * 16 + (lane % 4) * 4;
            *reinterpret_cast<u32 *>(at) = pair(d[part][4 * j] * factor, d[part][4 * j + 1] * factor);
            *reinterpret_cast<u32 *>(at + 1024) = pair(d[part][4 * j + 2] * factor, d[part][4 * j + 3] * factor);
        }
    }
    warpgroup_sync(name);
    const int chunk = thread % chunks;
#pragma unroll 8
    for (int i = 0; i < half_rows / at_once; ++i) {
        const int r = thread / chunks + at_once * i;
        if (r < rows)
            *reinterpret_cast<uint4 *>(to + r * row_stride + chunk * 8) = *reinterpret_cast<const uint4 *>(
                tile + (chunk / 8) * half + r * 128 + ((chunk % 8) ^ (r % 8)) * 16);
    }
}

// The warpgroups that multiply take turns: each gives the other its turn when it has issued its products.
__device__ __forceinline__ void take_turn(int worker) { asm volatile("bar.sync %0, 256;" ::"r"(3 + worker) : "memory"); }
__device__ __forceinline__ void give_turn(int worker) {
    asm volatile("bar.arrive %0, 256;" ::"r"(3 + (worker ^ 1)) : "memory");
}

// Tiles in the order in which they are taken: all heads of a tile beside each other, the longest sums first.
struct Item {
    int tile, head;
    __device__ __forceinline__ Item(int number, int tiles, int heads)
        : tile(tiles - 1 - number / heads), head(number % heads) {}
};

// A tile of queries and the keys that they see in blocks of KB, from the last to the first; a warpgroup's 64 of the
// queries, of which each thread has two, 8 apart.
template <int KB, bool extended> struct Seen {
    int top, first, begin, last_border;
    int own_first, own_begin, row, start, start8;
    __device__ __forceinline__ Seen(int tile, int worker) {
        first = tile * block_rows;
        top = (first + block_rows) / KB - 1;
        own_first = first + worker * half_rows;
        row = own_first + threadIdx.x % warpgroup / 32 * 16 + threadIdx.x % 32 / 4;
    }
    __device__ __forceinline__ void find(const int *cu_seqlens, int borders, int tokens, int window) {
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
        if constexpr (extended) {
            begin = max(begin, first - window + 1);
            own_begin = max(own_begin, own_first - window + 1);
            start = max(start, row - window + 1);
            start8 = max(start8, row + 9 - window);
            last_border = max(last_border, own_first + half_rows - window);
        }
    }
    __device__ __forceinline__ int blocks() const { return top - begin / KB + 1; }
    // Of the blocks in their order a warpgroup needs those from number `skip` to before number `own_blocks`.
    __device__ __forceinline__ int skip() const { return top - (own_first + half_rows - 1) / KB; }
    __device__ __forceinline__ int own_blocks() const { return top - own_begin / KB + 1; }
    __device__ __forceinline__ int first_key(int n) const { return (top - n) * KB; }
    __device__ __forceinline__ bool masked(int key_block) const {
        return key_block + KB - 1 > own_first || key_block < last_border;
    }
    // Whether accumulator i of a [64, KB] block of scores counts.
    __device__ __forceinline__ bool sees(int i, int key_block) const {
        const int key = key_block + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        return i % 4 < 2 ? key <= row && key >= start : key <= row + 8 && key >= start8;
    }
};

}  // namespace surogate
