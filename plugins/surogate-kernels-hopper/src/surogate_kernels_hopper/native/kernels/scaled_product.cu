// FP8 products of Hopper with what LoRA adds in the same sum: out = Σ (a · inverse_a)(b · inverse_b)ᵀ + u vᵀ, in bf16.
//
// Codes are in tiles of 128 rows by 128 of the inner dimension, 16 KiB that lie together in the order in which wgmma
// reads them from shared memory (16-byte chunk c of row r at c ^ (r % 8)): a tile is one bulk copy. A block has 128 rows
// and 256 or 128 columns of the output. One warp copies, three bring what is added in bf16, two warpgroups multiply. The
// codes are summed by the tensor cores alone, in their own precision. Pairs of blocks that share copies (multicast) were
// a fifth slower: they wait for each other.
//
// Forward, the projections of a panel are ranges of the output's columns, and u's 16 or more columns of each go with
// its own rows of v. Backward they are ranges of the inner dimension, whose sums are brought to one scale where one
// range ends; all columns of u count. Every output has one block and one order of summation.
//
// Few rows would have few blocks, most of the GPU would be idle, and each block takes 0.6 µs for 128 of the inner
// dimension. So their blocks have 128 columns, and where there are still too few, a cluster of two has one tile of the
// output: each multiplies half of the inner dimension and adds up half of the tile, in the order of the blocks.

#include "product_sm90.cuh"

namespace surogate {

constexpr int block_rows = 128, inner = 128;
constexpr int most = 4;        // projections of a panel
constexpr int most_steps = 4;  // of 16 ranks
constexpr u32 tile_bytes = block_rows * inner;
constexpr int threads = 3 * warpgroup;

// A block's shared memory; it has `columns` columns of the output.
template <int columns> struct Shared {
    static constexpr int wide = columns / 128, stages = 12 / (1 + wide), step_bytes = columns * 32;
    static constexpr int pitch = columns + 8;  // floats from row to row of a tile of sums: no two rows share banks
    char a[stages][tile_bytes];
    char b[stages][wide * tile_bytes];
    char v[most_steps][step_bytes];
    u64 full[stages], empty[stages], v_full, v_empty;
    float inverse[most];  // of the scales of a's ranges and of the weights, multiplied
    static_assert(block_rows * pitch * sizeof(float) <= stages * (1 + wide) * tile_bytes, "sums replace the operands");
};
static_assert(sizeof(Shared<256>) <= 230'528 && sizeof(Shared<128>) <= 230'528, "what a launch asks for");

template <int slots> struct Place {
    int slot = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++slot == slots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// The frozen weights of a panel's projections: 1 / scale, and 128 bytes on the codes.
struct Weights {
    const char *packed[most];
    int ends[most];  // of their outputs
    __device__ __forceinline__ int of(int output) const {
        return (output >= ends[0]) + (output >= ends[1]) + (output >= ends[2]);
    }
    __device__ __forceinline__ int begin(int slot) const { return slot == 0 ? 0 : ends[slot - 1]; }
};

// A thread's sums of rows `row` and `row` + 8 of a tile into shared memory.
template <int count> __device__ __forceinline__ void keep_sums(const float (&d)[count], u32 sums, int row, int column) {
#pragma unroll
    for (int i = 0; i < count; i += 2) {
        const u32 to = sums + ((row + i % 4 / 2 * 8) * Shared<2 * count>::pitch + i / 4 * 8 + column) * 4;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(d[i]), "f"(d[i + 1]) : "memory");
    }
}

// The sums of a tile by the blocks of a cluster, added in their order and rounded; each block does a share of the rows.
template <int columns, int splits> __device__ __forceinline__ void add_parts(u32 sums, u16 *out, long long out_row) {
    constexpr int own = block_rows / splits, chunks = columns / 8;
    const int rank = blockIdx.x % splits;
#pragma unroll
    for (int first = 0; first < own * chunks; first += 2 * warpgroup) {
        const int i = first + threadIdx.x - warpgroup;
        const int row = rank * own + i / chunks, column = i % chunks * 8;
        float parts[splits][8];
#pragma unroll
        for (int other = 0; other < splits; ++other)
            load_from_block(parts[other], sums + (row * Shared<columns>::pitch + column) * 4, other);
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float low = 0.0f, high = 0.0f;
#pragma unroll
            for (int other = 0; other < splits; ++other) low += parts[other][2 * j], high += parts[other][2 * j + 1];
            x[j] = pair(low, high);
        }
        *reinterpret_cast<uint4 *>(out + row * out_row + column) = make_uint4(x[0], x[1], x[2], x[3]);
    }
}

// `splits`: blocks of a cluster, which share the inner dimension.
template <bool gradient, int block_columns, int splits>
__device__ void scaled_product(const char *a, const float *figures, Weights weights, const u16 *u, int u_row,
                               const u16 *v, int v_row, int rank, int steps, u16 *out, long long out_row, int rows,
                               int inputs, int outputs) {
    extern __shared__ __align__(1024) char memory[];
    using Own = Shared<block_columns>;
    constexpr int stages = Own::stages, wide = Own::wide, step_bytes = Own::step_bytes;
    Own &shared = *reinterpret_cast<Own *>(memory);
    const int role = __shfl_sync(~0u, threadIdx.x / warpgroup, 0);
    const u32 full = shared_address(shared.full), empty = shared_address(shared.empty),
              v_full = shared_address(&shared.v_full), v_empty = shared_address(&shared.v_empty),
              a_tile = shared_address(shared.a), b_tile = shared_address(shared.b);
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 2);
        }
        barrier_init(v_full, 96);
        barrier_init(v_empty, 2);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int columns = gradient ? inputs : outputs, all = (gradient ? outputs : inputs) / inner;
    const int row_tiles = rows / block_rows, tiles = row_tiles * (columns / block_columns);
    const int split = blockIdx.x % splits, first_block = all * split / splits;
    const int blocks = all * (split + 1) / splits - first_block;
    if (split > 0) steps = 0;  // the first block of a cluster has what is added

    if (role == 0) {
        registers_down<40>();
        const int warp = threadIdx.x / 32;
        if (warp == 0) {
            if (threadIdx.x == 0) {
                Place<stages> place;
                for (int tile = blockIdx.x / splits; tile < tiles; tile += gridDim.x / splits) {
                    const int row_tile = tile % row_tiles, column = tile / row_tiles * block_columns;
                    const char *from = a + (static_cast<long long>(row_tile) * all + first_block) * tile_bytes;
                    int slot = gradient ? 0 : weights.of(column);
                    // The tile's rows of the weight; of 256 the second half is `half` bytes behind.
                    long long half = 0;
                    const auto rows_of = [&](int slot) {
                        const int own = weights.ends[slot] - weights.begin(slot);
                        const long long size = static_cast<long long>(own) * inputs;
                        const int row = column - (gradient ? 0 : weights.begin(slot));
                        const long long across = gradient ? own : inputs;
                        half = block_rows * across;
                        return weights.packed[slot] + 128 + (gradient ? size : 0) + row * across;
                    };
                    const char *weight = rows_of(slot) + first_block * tile_bytes;
                    int end = gradient ? weights.ends[0] / inner : blocks;
                    for (int n = 0; n < blocks; ++n, place.next()) {
                        if (gradient && n == end) {
                            weight = rows_of(++slot);
                            end = weights.ends[slot] / inner;
                        }
                        barrier_wait(empty + 8 * place.slot, place.parity ^ 1);
                        barrier_expect(full + 8 * place.slot, (1 + wide) * tile_bytes);
                        copy_bulk(a_tile + place.slot * tile_bytes, from, tile_bytes, full + 8 * place.slot);
                        const u32 right = b_tile + wide * place.slot * tile_bytes;
                        copy_bulk(right, weight, tile_bytes, full + 8 * place.slot);
                        if (wide == 2) copy_bulk(right + tile_bytes, weight + half, tile_bytes, full + 8 * place.slot);
                        from += tile_bytes;
                        weight += tile_bytes;
                    }
                }
            }
        } else {
            u32 parity = 1;
            for (int tile = blockIdx.x / splits; tile < tiles && steps > 0; tile += gridDim.x / splits, parity ^= 1) {
                const int column = tile / row_tiles * block_columns;
                const int first = gradient ? 0 : weights.of(column) * rank;
                barrier_wait(v_empty, parity);
                for (int i = threadIdx.x - 32; i < block_columns * steps * 2; i += 96) {
                    const int row = i % block_columns, chunk = i / block_columns;
                    const uint4 value = __ldg(reinterpret_cast<const uint4 *>(
                        v + static_cast<long long>(column + row) * v_row + first + chunk * 8));
                    *reinterpret_cast<uint4 *>(&shared.v[0][0] + chunk * (step_bytes / 2) + row * 16) = value;
                }
                fence_shared();
                barrier_arrive(v_full);
            }
        }
        if constexpr (splits > 1) {
            __syncwarp();
            cluster_sync();  // the sums are there
            cluster_sync();  // and have been read
        }
    } else {
        registers_up<232>();
        const int worker = role - 1, thread = threadIdx.x % warpgroup, lane = thread % 32;
        const u32 v_tile = shared_address(shared.v);
        if (worker == 0 && thread < most && (thread == 0 || weights.ends[thread - 1] < outputs)) {
            // figures: (scale, 1 / scale, largest value, 0) of each range of a.
            const float own = __ldg(figures + (gradient ? 4 * thread : 0) + 1);
            shared.inverse[thread] = own * __ldg(reinterpret_cast<const float *>(weights.packed[thread]));
        }
        workers_sync();
        Place<stages> place;
        u32 v_parity = 0;
        float d[block_columns / 2];
        for (int tile = blockIdx.x / splits; tile < tiles; tile += gridDim.x / splits) {
            const int row = tile % row_tiles * block_rows + worker * 64 + thread / 32 * 16 + lane / 4;
            const int column = tile / row_tiles * block_columns;
            int slot = gradient ? 0 : weights.of(column);
            u32 added[most_steps][4];
#pragma unroll
            for (int s = 0; s < most_steps; ++s) {
                if (s < steps) {
                    const u16 *at = u + static_cast<long long>(row) * u_row + (gradient ? 0 : slot * rank) + s * 16 +
                                    lane % 4 * 2;
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        added[s][i] = __ldg(reinterpret_cast<const u32 *>(at + i % 2 * 8 * u_row + i / 2 * 8));
                }
            }
            int end = gradient ? weights.ends[0] / inner : blocks;
            int before = 0;
            for (int n = 0; n < blocks; ++n) {
                if (gradient && n == end) {
                    const float ratio = fminf(shared.inverse[slot] / shared.inverse[slot + 1], 3.402823466e+38f);
                    end = weights.ends[++slot] / inner;
                    wgmma_wait<0>();
                    settled(d);
#pragma unroll
                    for (int i = 0; i < block_columns / 2; ++i) d[i] *= ratio;
                }
                barrier_wait(full + 8 * place.slot, place.parity);
                wgmma_fence();
                const u64 left = by_columns(a_tile + place.slot * tile_bytes + worker * 64 * inner);
                const u64 right = by_columns(b_tile + wide * place.slot * tile_bytes);
#pragma unroll
                for (int s = 0; s < inner / 32; ++s) multiply_codes<gradient>(d, left + 2 * s, right + 2 * s, n + s);
                wgmma_commit();
                if (n > 0) {
                    wgmma_wait<1>();
                    if (thread == 0) barrier_arrive(empty + 8 * before);
                }
                before = place.slot;
                place.next();
            }
            wgmma_wait<0>();
            settled(d);
            if (thread == 0) barrier_arrive(empty + 8 * before);
            const float inverse = shared.inverse[slot];
#pragma unroll
            for (int i = 0; i < block_columns / 2; ++i) d[i] *= inverse;
            if (steps > 0) {
                barrier_wait(v_full, v_parity);
                v_parity ^= 1;
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < most_steps; ++s) {
                    if (s < steps) multiply_added(d, added[s], unswizzled(v_tile + s * step_bytes, step_bytes / 2));
                }
                wgmma_commit();
                wgmma_wait<0>();
                settled(d);
                if (thread == 0) barrier_arrive(v_empty);
            }
            if constexpr (splits > 1) {
                const u32 sums = shared_address(memory);
                workers_sync();  // no product reads the operands any more
                keep_sums(d, sums, worker * 64 + thread / 32 * 16 + lane / 4, lane % 4 * 2);
                cluster_sync();
                u16 *to = out + static_cast<long long>(tile % row_tiles * block_rows) * out_row + column;
                add_parts<block_columns, splits>(sums, to, out_row);
                cluster_sync();
            } else {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u16 *to = out + static_cast<long long>(row + 8 * half) * out_row + column + lane % 4 * 8;
#pragma unroll
                    for (int q = 0; q < block_columns / 32; ++q) {
                        u32 x[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int at = 4 * (4 * q + i) + 2 * half;
                            x[i] = pair(d[at], d[at + 1]);
                        }
                        transpose(x);
                        *reinterpret_cast<uint4 *>(to + 32 * q) = make_uint4(x[0], x[1], x[2], x[3]);
                    }
                }
            }
        }
    }
}

}  // namespace surogate

#define SCALED_PRODUCT(name, cluster, gradient, columns, splits)                                                       \
    extern "C" __global__ void cluster __launch_bounds__(surogate::threads, 1)                                         \
        name(const char *a, const float *figures, const char *w0, const char *w1, const char *w2, const char *w3,      \
             int e0, int e1, int e2, const surogate::u16 *u, int u_row, const surogate::u16 *v, int v_row, int rank,   \
             int steps, surogate::u16 *out, long long out_row, int rows, int inputs, int outputs) {                    \
        SUROGATE_HOPPER(scaled_product<gradient, columns, splits>(                                                     \
            a, figures, {{w0, w1, w2, w3}, {e0, e1, e2, outputs}}, u, u_row, v, v_row, rank, steps, out, out_row,      \
            rows, inputs, outputs));                                                                                   \
    }
#define SCALED_PRODUCT_OF_FEW(splits)                                                                                  \
    SCALED_PRODUCT(scaled_product_of_few_##splits, SUROGATE_CLUSTER(splits), false, 128, splits)

SCALED_PRODUCT(scaled_product_forward, , false, 256, 1)
SCALED_PRODUCT(scaled_product_backward, , true, 256, 1)
SCALED_PRODUCT_OF_FEW(1)
SCALED_PRODUCT_OF_FEW(2)
