// Rounding to NVFP4 (arXiv 2509.25149): E2M1 codes in blocks with E4M3 scales, and one fp32 scale a tensor.
//
// Bit for bit what surogate_core/kernels/nvfp4.py says: the same operations in the same order, none of them
// contracted, and subnormal numbers kept. The largest value of the tensor is found by one launch, and blocks are
// rounded by a second one. A thread has a block of 1×16, or a row of one of 16×16. Conversions are written out, so that
// they run on every chip.
//
// R rows, K the inner dimension, which blocks lie along; Q is K up to the next multiple of 16.
#include "random.cuh"

namespace surogate {

// The toolkit's headers are not there where subnormal numbers are kept; see `Module` of surogate_core/kernels/building/native.py.
struct bfloat16 {
    unsigned short bits;
};

// As many elements as 16 bytes hold.
template <typename T> struct alignas(16) Vector {
    static constexpr int width = 16 / sizeof(T);
    T values[width];
};

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

constexpr int threads = 256;
constexpr int width = 16;
constexpr int tiles = threads / width;
constexpr float largest_code = 6.0f;
constexpr float largest_scale = 448.0f;
constexpr unsigned infinity_bits = 0x7f800000u;

struct Flags {
    bool four_over_six, rotated;
};

__device__ __forceinline__ Flags unpacked(int flags) { return {(flags & 1) != 0, (flags & 2) != 0}; }

// ------------------------------------------------------------------------------------------ codes and scales

// The scale of a tensor and what undoes it, from the bits of its largest absolute value.
struct Tensorwise {
    float encode, decode;
    bool nan;
};

__device__ __forceinline__ Tensorwise tensorwise(unsigned amax_bits, float top) {
    const float amax = __uint_as_float(amax_bits);
    float encode = __fdiv_rn(top, amax);
    if (__float_as_uint(encode) == infinity_bits) encode = 3.402823466e+38f;
    if (amax == 0.0f || amax_bits == infinity_bits) encode = 1.0f;
    return {encode, __fdiv_rn(1.0f, encode), amax_bits > infinity_bits};
}

// E4M3 bits of a value in 0…inf, saturated, to nearest with ties to even.
__device__ __forceinline__ unsigned to_e4m3(float x) {
    x = fminf(x, largest_scale);
    // Below 2⁻⁶ codes are multiples of 2⁻⁹; the eighth is the first normal one.
    if (x < 0.015625f) return static_cast<unsigned>(rintf(x * 512.0f));
    const unsigned bits = __float_as_uint(x);
    return ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
}

__device__ __forceinline__ float from_e4m3(unsigned code) {
    return code < 8u ? static_cast<float>(code) * 0.001953125f : __uint_as_float((code + (120u << 3)) << 20);
}

__device__ __forceinline__ float magnitude(unsigned code) {
    const unsigned index = code & 7u;
    const float x = static_cast<float>(index);
    return index < 4u ? x * 0.5f : (index < 6u ? x - 2.0f : x * 2.0f - 8.0f);
}

__device__ __forceinline__ float value_of(unsigned code) { return code & 8u ? -magnitude(code) : magnitude(code); }

__device__ __forceinline__ float ratio_of(float x, float divisor) {
    return divisor == 0.0f ? 0.0f : __fdiv_rn(x, divisor);
}

__device__ __forceinline__ unsigned sign_of(float x) { return (__float_as_uint(x) >> 31) << 3; }

// E2M1 code to nearest, of two the even one.
__device__ __forceinline__ unsigned nearest(float x) {
    const float size = fabsf(x);
    const unsigned index = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                           (size >= 3.5f) + (size > 5.0f);
    return index | sign_of(x);
}

// One of the two neighbours, the upper with the probability of the distance from the lower.
__device__ __forceinline__ unsigned stochastic(float x, unsigned bits) {
    const float size = fminf(fabsf(x), largest_code);
    const int range = size < 2.0f ? 0 : (size < 4.0f ? 1 : 2);
    const float number = range == 0 ? size * 2.0f : (range == 1 ? size : size * 0.5f);
    const float lower = floorf(number);
    const float uniform = static_cast<float>(bits >> 8) * 5.9604644775390625e-8f;
    const unsigned steps = static_cast<unsigned>(lower) + (uniform < __fsub_rn(number, lower) ? 1u : 0u);
    return (steps + 2u * static_cast<unsigned>(range)) | sign_of(x);
}

// The scales that a block may have: its largest value as 6, and with four-over-six as 4.
struct Candidates {
    unsigned scale[2];
};

__device__ __forceinline__ Candidates candidates_of(float amax, const Tensorwise &tensor, bool four_over_six) {
    if (!four_over_six) return {{to_e4m3(__fdiv_rn(__fmul_rn(amax, tensor.encode), largest_code)), 0u}};
    const float unrounded = __fmul_rn(__fdiv_rn(amax, largest_code), tensor.encode);
    return {{to_e4m3(unrounded), to_e4m3(__fmul_rn(unrounded, 1.5f))}};
}

__device__ __forceinline__ double squared_error(float x, unsigned scale, float decode) {
    const float divisor = __fmul_rn(from_e4m3(scale), decode);
    const double step = __dmul_rn(static_cast<double>(from_e4m3(scale)), static_cast<double>(decode));
    const double found = __dmul_rn(static_cast<double>(value_of(nearest(ratio_of(x, divisor)))), step);
    const double error = __dsub_rn(found, static_cast<double>(x));
    return __dmul_rn(error, error);
}

// Halves added until one is left.
template <int count> __device__ __forceinline__ double folded(const double (&x)[count]) {
    if constexpr (count == 1) {
        return x[0];
    } else {
        double sums[count / 2];
#pragma unroll
        for (int i = 0; i < count / 2; ++i) sums[i] = __dadd_rn(x[i], x[i + count / 2]);
        return folded(sums);
    }
}

// ------------------------------------------------------------------------------------------ Hadamard

// x · ¼ · diag(S) · H₁₆.
__device__ __forceinline__ void rotate(float (&x)[width]) {
    constexpr unsigned minus = 0xd7e8u;
#pragma unroll
    for (int i = 0; i < width; ++i) x[i] = (minus >> i) & 1u ? -x[i] : x[i];
#pragma unroll
    for (int distance = 1; distance < width; distance *= 2)
#pragma unroll
        for (int i = 0; i < width; ++i)
            if ((i & distance) == 0) {
                const float upper = x[i], lower = x[i + distance];
                x[i] = __fadd_rn(upper, lower);
                x[i + distance] = __fsub_rn(upper, lower);
            }
#pragma unroll
    for (int i = 0; i < width; ++i) x[i] = __fmul_rn(x[i], 0.25f);
}

// ------------------------------------------------------------------------------------------ reading and writing

// Elements row·stride + k of a row, zeros after its end.
template <typename T> __device__ __forceinline__ void read_row(const T *row, long long k, int inner, float (&x)[width]) {
    const T *first = row + k;
    if (k + width <= inner && (reinterpret_cast<unsigned long long>(first) & 15u) == 0u) {
#pragma unroll
        for (int i = 0; i < width; i += Vector<T>::width) {
            const Vector<T> vector = *reinterpret_cast<const Vector<T> *>(first + i);
#pragma unroll
            for (int j = 0; j < Vector<T>::width; ++j) x[i + j] = wide(vector.values[j]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < width; ++i) x[i] = k + i < inner ? wide(first[i]) : 0.0f;
}

// A block of 1×16 of the matrix, or of its transpose, which is read along its rows by neighbouring threads.
template <typename T, bool transposed>
__device__ __forceinline__ void read_block(const T *x, long long stride, long long row, long long k, int inner,
                                           bool rotated, float (&values)[width]) {
    if (!transposed) {
        read_row(x + row * stride, k, inner, values);
    } else {
#pragma unroll
        for (int i = 0; i < width; ++i) values[i] = k + i < inner ? wide(x[(k + i) * stride + row]) : 0.0f;
    }
    if (rotated) rotate(values);
}

// Which block a thread has: neighbours read neighbouring elements.
template <bool transposed>
__device__ __forceinline__ bool place(int rows, int blocks, long long &row, long long &block) {
    const long long number = static_cast<long long>(blockIdx.x) * threads + threadIdx.x;
    row = transposed ? number % rows : number / blocks;
    block = transposed ? number / rows : number % blocks;
    return number < static_cast<long long>(rows) * blocks;
}

__device__ __forceinline__ void write_codes(const unsigned (&codes)[width], unsigned char *to) {
    uint2 packed{0u, 0u};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        packed.x |= codes[i] << (4 * i);
        packed.y |= codes[i + 8] << (4 * i);
    }
    *reinterpret_cast<uint2 *>(to) = packed;
}

// Codes times their scale, which bf16 holds exactly. `room`: how many there are to write.
__device__ __forceinline__ void write_values(const unsigned (&codes)[width], unsigned scale, bool nan,
                                             bfloat16 *to, long long room) {
    const float step = from_e4m3(scale);
    Vector<bfloat16> halves[2];
#pragma unroll
    for (int i = 0; i < width; ++i) {
        const float value = nan ? __uint_as_float(0x7fc00000u) : __fmul_rn(value_of(codes[i]), step);
        halves[i / 8].values[i % 8] = {static_cast<unsigned short>(__float_as_uint(value) >> 16)};
    }
    if (room >= width && (reinterpret_cast<unsigned long long>(to) & 15u) == 0u) {
        reinterpret_cast<Vector<bfloat16> *>(to)[0] = halves[0];
        reinterpret_cast<Vector<bfloat16> *>(to)[1] = halves[1];
        return;
    }
#pragma unroll
    for (int i = 0; i < width; ++i)
        if (i < room) to[i] = halves[i / 8].values[i % 8];
}

// ------------------------------------------------------------------------------------------ kernels

// The bits of the largest absolute value; a NaN's are above all others'. `amax` is 0 before.
template <typename T, bool transposed>
__device__ void amax_of(const T *x, long long stride, int rows, int inner, int flags, unsigned *amax) {
    const int blocks = (inner + width - 1) / width;
    long long row, block;
    unsigned largest = 0u;
    if (place<transposed>(rows, blocks, row, block)) {
        float values[width];
        read_block<T, transposed>(x, stride, row, block * width, inner, unpacked(flags).rotated, values);
#pragma unroll
        for (int i = 0; i < width; ++i) largest = max(largest, __float_as_uint(fabsf(values[i])));
    }
    __shared__ unsigned partial[threads];
    partial[threadIdx.x] = largest;
    for (int half = threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) partial[threadIdx.x] = max(partial[threadIdx.x], partial[threadIdx.x + half]);
    }
    // The largest is the same in whatever order.
    if (threadIdx.x == 0 && partial[0] > 0u) atomicMax(amax, partial[0]);
}

// Blocks of 1×16. Codes [R, Q/2] with scales [R, Q/16], or values [R, columns], whichever is there.
template <typename T, bool transposed>
__device__ void round_rows(const T *x, long long stride, int rows, int inner, int flags, const unsigned *amax,
                           const int *seed, unsigned salt, unsigned char *codes, unsigned char *scales,
                           bfloat16 *values, int columns, float *decode) {
    const auto [four_over_six, rotated] = unpacked(flags);
    const Tensorwise tensor = tensorwise(*amax, four_over_six ? 1536.0f : largest_scale * largest_code);
    if (blockIdx.x == 0 && threadIdx.x == 0) *decode = tensor.decode;
    const int blocks = (inner + width - 1) / width;
    long long row, block;
    if (!place<transposed>(rows, blocks, row, block)) return;
    float block_values[width];
    read_block<T, transposed>(x, stride, row, block * width, inner, rotated, block_values);
    float block_amax = 0.0f;
#pragma unroll
    for (int i = 0; i < width; ++i) block_amax = fmaxf(block_amax, fabsf(block_values[i]));
    const Candidates candidates = candidates_of(block_amax, tensor, four_over_six);
    unsigned scale = candidates.scale[0];
    if (four_over_six) {
        double sums[2];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            double errors[width];
#pragma unroll
            for (int i = 0; i < width; ++i)
                errors[i] = squared_error(block_values[i], candidates.scale[which], tensor.decode);
            sums[which] = folded(errors);
        }
        if (sums[1] < sums[0]) scale = candidates.scale[1];
    }
    const float divisor = __fmul_rn(from_e4m3(scale), tensor.decode);
    const unsigned key = seed == nullptr ? 0u : key_of(seed, salt);
    const unsigned counter = static_cast<unsigned>((row * blocks + block) * width);
    unsigned found[width];
#pragma unroll
    for (int i = 0; i < width; ++i) {
        const float ratio = ratio_of(block_values[i], divisor);
        found[i] = seed == nullptr ? nearest(ratio) : stochastic(ratio, hash32((counter + i) ^ key));
        if (tensor.nan) found[i] = 0u;
    }
    if (codes != nullptr) {
        write_codes(found, codes + (row * blocks + block) * (width / 2));
        scales[row * blocks + block] = static_cast<unsigned char>(tensor.nan ? 0x7fu : scale);
    }
    if (values != nullptr)
        write_values(found, scale, tensor.nan, values + row * columns + block * width, columns - block * width);
}

// Blocks of 16×16 to nearest, 16 of them a thread block. `transposed`: what is written is the transpose.
// Codes [P, Q/2] with scales [P/16, Q/16], or values [R, K], of the matrix or of its transpose.
template <typename T>
__device__ void round_tiles(const T *x, long long stride, int rows, int inner, int flags, const unsigned *amax,
                            int transposed, unsigned char *codes, unsigned char *scales, bfloat16 *values,
                            float *decode) {
    __shared__ double exchanged[tiles][width][width + 1];
    __shared__ unsigned char exchanged_codes[tiles][width][width];
    const bool four_over_six = unpacked(flags).four_over_six;
    const Tensorwise tensor = tensorwise(*amax, four_over_six ? 1536.0f : largest_scale * largest_code);
    if (blockIdx.x == 0 && threadIdx.x == 0) *decode = tensor.decode;
    const int tile = threadIdx.x / width, line = threadIdx.x % width;
    const long long tile_columns = (inner + width - 1) / width, tile_rows = (rows + width - 1) / width;
    const long long number = static_cast<long long>(blockIdx.x) * tiles + tile;
    const bool there = number < tile_rows * tile_columns;
    const long long tile_row = number / tile_columns, tile_column = number % tile_columns;
    const long long row = tile_row * width + line;

    float row_values[width] = {};
    if (there && row < rows) read_row(x + row * stride, tile_column * width, inner, row_values);
    float tile_amax = 0.0f;
#pragma unroll
    for (int i = 0; i < width; ++i) tile_amax = fmaxf(tile_amax, fabsf(row_values[i]));
    exchanged[tile][line][width] = tile_amax;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < width; ++i) tile_amax = fmaxf(tile_amax, static_cast<float>(exchanged[tile][i][width]));
    const Candidates candidates = candidates_of(tile_amax, tensor, four_over_six);
    double errors[2] = {};
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        if (!four_over_six) break;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < width; ++i)
            exchanged[tile][line][i] = squared_error(row_values[i], candidates.scale[which], tensor.decode);
        __syncthreads();
        // With the transpose's added, the sum is the same for the transpose to the last bit.
        double sums[width];
#pragma unroll
        for (int i = 0; i < width; ++i) sums[i] = __dadd_rn(exchanged[tile][line][i], exchanged[tile][i][line]);
        exchanged[tile][line][width] = folded(sums);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < width; ++i) sums[i] = exchanged[tile][i][width];
        errors[which] = folded(sums);
    }
    const unsigned scale = four_over_six && errors[1] < errors[0] ? candidates.scale[1] : candidates.scale[0];
    const float divisor = __fmul_rn(from_e4m3(scale), tensor.decode);
    unsigned found[width];
#pragma unroll
    for (int i = 0; i < width; ++i) found[i] = tensor.nan ? 0u : nearest(ratio_of(row_values[i], divisor));
    if (transposed) {
#pragma unroll
        for (int i = 0; i < width; ++i) exchanged_codes[tile][i][line] = static_cast<unsigned char>(found[i]);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < width; ++i) found[i] = exchanged_codes[tile][line][i];
    }
    if (!there) return;
    const long long out_tile_row = transposed ? tile_column : tile_row;
    const long long out_tile_column = transposed ? tile_row : tile_column;
    const long long out_tile_columns = transposed ? tile_rows : tile_columns;
    const long long out_rows = transposed ? inner : rows, out_inner = transposed ? rows : inner;
    const long long out_row = out_tile_row * width + line;
    if (codes != nullptr) {
        write_codes(found, codes + (out_row * out_tile_columns + out_tile_column) * (width / 2));
        if (line == 0)
            scales[out_tile_row * out_tile_columns + out_tile_column] =
                static_cast<unsigned char>(tensor.nan ? 0x7fu : scale);
    }
    if (values != nullptr && out_row < out_rows)
        write_values(found, scale, tensor.nan, values + out_row * out_inner + out_tile_column * width,
                     out_inner - out_tile_column * width);
}

}  // namespace surogate

#define NVFP4_ROWS(T, name, layout, transposed)                                                                        \
    extern "C" __global__ void __launch_bounds__(surogate::threads) nvfp4_amax_##layout##_##name(                      \
        const T *x, long long stride, int rows, int inner, int flags, unsigned *amax) {                                \
        surogate::amax_of<T, transposed>(x, stride, rows, inner, flags, amax);                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(surogate::threads) nvfp4_round_##layout##_##name(                     \
        const T *x, long long stride, int rows, int inner, int flags, const unsigned *amax, const int *seed,           \
        unsigned salt, unsigned char *codes, unsigned char *scales, surogate::bfloat16 *values, int columns,                \
        float *decode) {                                                                                               \
        surogate::round_rows<T, transposed>(x, stride, rows, inner, flags, amax, seed, salt, codes, scales, values,    \
                                            columns, decode);                                                          \
    }

#define NVFP4(T, name)                                                                                                 \
    NVFP4_ROWS(T, name, rows, false)                                                                                   \
    NVFP4_ROWS(T, name, columns, true)                                                                                 \
    extern "C" __global__ void __launch_bounds__(surogate::threads) nvfp4_round_tiles_##name(                          \
        const T *x, long long stride, int rows, int inner, int flags, const unsigned *amax, int transposed,            \
        unsigned char *codes, unsigned char *scales, surogate::bfloat16 *values, float *decode) {                           \
        surogate::round_tiles(x, stride, rows, inner, flags, amax, transposed, codes, scales, values, decode);         \
    }

NVFP4(float, float32)
NVFP4(surogate::bfloat16, bfloat16)
