// A bf16 matrix as FP8 codes in tiles, and its largest absolute value, from one reading; ranges of columns are tensors
// with scales of their own. The rule is `surogate_core.kernels.scaled`'s.

#include "begin.cuh"
#include "codes.cuh"

namespace surogate {

struct Ranges {
    int ends[4];
    __device__ __forceinline__ int of(int column) const {
        return (column >= ends[0]) + (column >= ends[1]) + (column >= ends[2]);
    }
};

constexpr int side = 128;                   // of a block's rows and columns
constexpr int lanes = side / 8;             // that have a row of them
constexpr int threads = 256;
constexpr int passes = side / (threads / lanes);

template <bool gradient>
__device__ void quantise(const unsigned short *x, long long x_row, float *figures, unsigned char *codes, int rows,
                         const Ranges &ranges) {
    const int columns = gridDim.x * side, column = blockIdx.x * side + threadIdx.x % lanes * 8;
    float *own = figures + figures_of_one * ranges.of(blockIdx.x * side);
    const float scale = own[0];
    const long long first = blockIdx.y * side + threadIdx.x / lanes;
    uint4 values[passes];
#pragma unroll
    for (int i = 0; i < passes; ++i) {
        const long long row = first + i * (threads / lanes);
        values[i] = __ldg(reinterpret_cast<const uint4 *>(x + row * x_row + column));
    }
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < passes; ++i) {
        const unsigned pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) most = larger(most, pairs[j]);
        const long long row = first + i * (threads / lanes);
        *reinterpret_cast<uint2 *>(codes + place_of(row, column, columns)) = codes_of<gradient>(pairs, scale);
    }
    enter_largest(most, own);
}

// The same of few rows that nobody's next scale depends on, with one scale, in one launch. Rows that fill the last tiles
// are zeros. `parts`: the bits of the largest absolute values of `count` parts, which are read while there is no scale.
__device__ void quantise_of_few(const unsigned short *x, long long x_row, int rows, const float *row, const int *parts,
                                int count, float limit, float factor, float *figures, unsigned char *codes) {
    const int columns = gridDim.x * side, column = blockIdx.x * side + threadIdx.x % lanes * 8;
    const long long first = blockIdx.y * side + threadIdx.x / lanes;
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    uint4 values[passes];
#pragma unroll
    for (int i = 0; i < passes; ++i) {
        const long long row = first + i * (threads / lanes);
        values[i] = row < rows ? __ldg(reinterpret_cast<const uint4 *>(x + row * x_row + column)) : zeros;
    }
    __shared__ int most;
    const float scale = *row;
    if (!(scale > 0.0f)) {
        if (threadIdx.x == 0) most = 0;
        __syncthreads();
        int own = 0;
        for (int i = threadIdx.x; i < count; i += threads) own = max(own, parts[i]);
        atomicMax(&most, __reduce_max_sync(~0u, own));
        __syncthreads();
    }
    float own[figures_of_one];
    begin_figures(scale, scale > 0.0f ? 0.0f : __uint_as_float(static_cast<unsigned>(most) << 16), limit, factor, own);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < figures_of_one; ++i) figures[i] = own[i];
    }
#pragma unroll
    for (int i = 0; i < passes; ++i) {
        const unsigned pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
        const long long row = first + i * (threads / lanes);
        *reinterpret_cast<uint2 *>(codes + place_of(row, column, columns)) = codes_of<false>(pairs, own[0]);
    }
}

}  // namespace surogate

extern "C" __global__ void __launch_bounds__(surogate::threads)
    quantise_of_few(const unsigned short *x, long long x_row, int rows, const float *row, const int *parts, int count,
                    float limit, float factor, float *figures, unsigned char *codes) {
    surogate::quantise_of_few(x, x_row, rows, row, parts, count, limit, factor, figures, codes);
}

#define QUANTISE(name, gradient)                                                                                       \
    extern "C" __global__ void __launch_bounds__(surogate::threads)                                                    \
        name(const unsigned short *x, long long x_row, float *figures, unsigned char *codes, int rows, int e0, int e1, \
             int e2, int e3) {                                                                                         \
        surogate::quantise<gradient>(x, x_row, figures, codes, rows, surogate::Ranges{{e0, e1, e2, e3}});              \
    }

QUANTISE(quantise_e4m3, false)
QUANTISE(quantise_e5m2, true)
