// A bf16 matrix as FP8 codes, row by row, the codes of its transpose, and its largest absolute value, from one reading. The
// rule is `surogate_core.kernels.scaled`'s.
//
// A block has 128 rows and 128 columns, a thread four rows of 8 columns twice: 4 × 4 bytes are turned in registers, so
// that four codes of a column go through shared memory as one word.

#include "begin.cuh"
#include "codes.cuh"

namespace surogate {

using u32 = unsigned int;

constexpr int side = 128, threads = 256;
constexpr int lanes = side / 8;            // that have a row of the block
constexpr int words = side / 4;            // of a column's codes
constexpr int items = lanes * words / threads;

// Byte j of word i becomes byte i of word j.
__device__ __forceinline__ void turn(u32 (&x)[4]) {
    const u32 a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
    const u32 c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
    x[0] = __byte_perm(a, b, 0x5410);
    x[1] = __byte_perm(a, b, 0x7632);
    x[2] = __byte_perm(c, d, 0x5410);
    x[3] = __byte_perm(c, d, 0x7632);
}

template <bool gradient>
__device__ __forceinline__ void quantise_both(const unsigned short *x, long long x_row, float *figures,
                                              float *inverse, unsigned char *codes, unsigned char *transposed, int rows,
                                              int columns) {
    __shared__ __align__(16) u32 turned[side][words];  // a column's words w at w ^ (2 · (column / 8))
    __shared__ u32 largest;
    const long long first_row = blockIdx.y * side;
    const int first_column = blockIdx.x * side, lane = threadIdx.x % lanes;
    const float scale = __ldg(figures);
    if (threadIdx.x == 0) {
        largest = 0;
        if (blockIdx.x == 0 && blockIdx.y == 0) *inverse = figures[1];
    }
    const unsigned short *from = x + first_row * x_row + first_column + lane * 8;
    uint4 raw[items][4];
#pragma unroll
    for (int i = 0; i < items; ++i) {
        const int word = threadIdx.x / lanes + i * (threads / lanes);
#pragma unroll
        for (int r = 0; r < 4; ++r) raw[i][r] = __ldg(reinterpret_cast<const uint4 *>(from + (word * 4 + r) * x_row));
    }
    unsigned char *to = codes + first_row * columns + first_column + lane * 8;
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < items; ++i) {
        const int word = threadIdx.x / lanes + i * (threads / lanes);
        u32 low[4], high[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const u32 pairs[4] = {raw[i][r].x, raw[i][r].y, raw[i][r].z, raw[i][r].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) most = larger(most, pairs[j]);
            const uint2 made = codes_of<gradient>(pairs, scale);
            *reinterpret_cast<uint2 *>(to + static_cast<long long>(word * 4 + r) * columns) = made;
            low[r] = made.x, high[r] = made.y;
        }
        turn(low);
        turn(high);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            turned[lane * 8 + j][word ^ 2 * lane] = low[j];
            turned[lane * 8 + 4 + j][word ^ 2 * lane] = high[j];
        }
    }
    __syncthreads();
    const u32 own = __reduce_max_sync(~0u, most << 16 > (most & 0xffff0000u) ? most << 16 : most & 0xffff0000u);
    if (threadIdx.x % 32 == 0) atomicMax(&largest, own);
#pragma unroll
    for (int i = 0; i < side * lanes / threads; ++i) {
        const int column = threadIdx.x / lanes + i * (threads / lanes);
        *reinterpret_cast<uint2 *>(transposed + static_cast<long long>(first_column + column) * rows + first_row + lane * 8) =
            *reinterpret_cast<const uint2 *>(&turned[column][2 * (lane ^ column / 8)]);
    }
    __syncthreads();
    if (threadIdx.x == 0) atomicMax(reinterpret_cast<u32 *>(figures) + 2, largest);
}

}  // namespace surogate

#define QUANTISE_BOTH(name, gradient)                                                                                  \
    extern "C" __global__ void __launch_bounds__(surogate::threads)                                                    \
        name(const unsigned short *x, long long x_row, float *figures, float *inverse, unsigned char *codes,           \
             unsigned char *transposed, int rows, int columns) {                                                       \
        surogate::quantise_both<gradient>(x, x_row, figures, inverse, codes, transposed, rows, columns);               \
    }

QUANTISE_BOTH(quantise_both_e4m3, false)
QUANTISE_BOTH(quantise_both_e5m2, true)
