// A step of 8-bit AdamW (arXiv 2110.02861) over a range of a flat group: everything is read and written once.
//
// Bit for bit what surogate_core/kernels/blockwise.py says: the same operations in the same order, contracted only where
// fmaf is written, and subnormal numbers kept. A warp has a block of 256 elements, and a thread eight of them: four
// beside each other in either half of the block.
//
// Codes are found as there: the upper 16 bits of a float name a range of numbers that holds at most one border, so one
// look-up and one comparison decide. Ranges below 2^-23 all hold the border next to 0 or none, so that the table begins
// there and fits into shared memory.
#include "random.cuh"

namespace surogate {

constexpr int threads = 256;
constexpr int warp = 32;
constexpr int block_size = 256;
constexpr int quad = 4;                               // elements beside each other that a thread has
constexpr int quads = block_size / (warp * quad);
constexpr unsigned full = 0xffffffffu;
constexpr unsigned infinity_bits = 0x7f800000u, smallest_normal = 0x00800000u;
constexpr int lowest_pattern = (104 << 7) - 1;        // the upper half of a float just below 2^-23
constexpr int patterns = 0x3f80 - lowest_pattern + 1; // to that of 1
constexpr int tables_size = 3 * patterns + 10;        // padded to 16 bytes

// What the wrapper packs; m is signed and v is not.
struct alignas(16) Tables {
    float first_values[256], first_borders[256], second_values[256], second_borders[256];
    // The lowest code of each range of numbers: v, m from 0 on, m below 0.
    unsigned char lowest[tables_size];
};
static_assert(tables_size % 16 == 0 && sizeof(Tables) == 4096 + tables_size, "the wrapper's layout");

struct Arguments {
    const float *grad;
    const float *lr, *clip, *size, *epsilon;
    float beta1, rest1, beta2, rest2, weight_decay;
};

// `rounding.stochastic_bf16`: the upper half of the float.
__device__ __forceinline__ unsigned stochastic_bf16(float x, unsigned random) {
    const unsigned bits = __float_as_uint(x);
    const bool finite = (bits & infinity_bits) != infinity_bits;
    if (finite) return (bits + (random & 0xffffu)) >> 16;
    // A NaN stays one whose fraction is in the lower half.
    return (bits >> 16) | ((bits & 0x7fffffu) ? 0x40u : 0u);
}

template <bool is_signed> __device__ __forceinline__ unsigned code_of(float x, const Tables &tables) {
    const unsigned bits = __float_as_uint(x);
    int place = min(max(static_cast<int>((bits & 0x7fffffffu) >> 16), lowest_pattern), 0x3f80) - lowest_pattern;
    if constexpr (is_signed) place += (bits >> 31) ? 2 * patterns : patterns;
    const unsigned code = tables.lowest[place];
    return code + (x > (is_signed ? tables.first_borders : tables.second_borders)[code]);
}

// The four codes of a quad as the bytes of a word, and the block's largest absolute value.
template <bool is_signed>
__device__ __forceinline__ void quantise(const float (&x)[quads][quad], unsigned *codes, float *absmax, long long block,
                                         int lane, const Tables &tables) {
    unsigned top = 0;
#pragma unroll
    for (int i = 0; i < quads * quad; ++i) top = max(top, __float_as_uint(x[i / quad][i % quad]) & 0x7fffffffu);
    top = __reduce_max_sync(full, top);
    const float inverse = __fdiv_rn(1.0f, __uint_as_float(max(top, smallest_normal)));
#pragma unroll
    for (int h = 0; h < quads; ++h) {
        unsigned word = 0;
#pragma unroll
        for (int j = 0; j < quad; ++j) {
            word |= code_of<is_signed>(__fmul_rn(x[h][j], inverse), tables) << (8 * j);
        }
        codes[(block * block_size + h * warp * quad) / quad + lane] = word;
    }
    if (lane == 0) absmax[block] = __uint_as_float(top);
}

// Moments as codes, or as fp32 where a tensor is small.
template <bool eight>
__device__ __forceinline__ void read(float (&x)[quads][quad], const void *state, const float *absmax, long long block,
                                     int lane, const float *values) {
#pragma unroll
    for (int h = 0; h < quads; ++h) {
        const long long at = (block * block_size + h * warp * quad) / quad + lane;
        if constexpr (eight) {
            const unsigned word = static_cast<const unsigned *>(state)[at];
#pragma unroll
            for (int j = 0; j < quad; ++j) x[h][j] = __fmul_rn(values[(word >> (8 * j)) & 0xffu], absmax[block]);
        } else {
            const float4 found = static_cast<const float4 *>(state)[at];
            x[h][0] = found.x, x[h][1] = found.y, x[h][2] = found.z, x[h][3] = found.w;
        }
    }
}

template <bool is_signed, bool eight>
__device__ __forceinline__ void write(const float (&x)[quads][quad], void *state, float *absmax, long long block,
                                      int lane, const Tables &tables) {
    if constexpr (eight) {
        quantise<is_signed>(x, static_cast<unsigned *>(state), absmax, block, lane, tables);
    } else {
#pragma unroll
        for (int h = 0; h < quads; ++h) {
            static_cast<float4 *>(state)[(block * block_size + h * warp * quad) / quad + lane] =
                make_float4(x[h][0], x[h][1], x[h][2], x[h][3]);
        }
    }
}

template <bool eight, bool narrow>
__device__ __forceinline__ void update(void *master, void *first, float *first_absmax, void *second,
                                       float *second_absmax, long long blocks, const Arguments &a, const Tables *given,
                                       const int *seed, unsigned salt, unsigned counted) {
    __shared__ Tables tables;
    if constexpr (eight) {
        for (int i = threadIdx.x; i < static_cast<int>(sizeof(Tables) / sizeof(uint4)); i += threads) {
            reinterpret_cast<uint4 *>(&tables)[i] = reinterpret_cast<const uint4 *>(given)[i];
        }
        __syncthreads();
    }
    const int lane = threadIdx.x % warp;
    const float clip = *a.clip, size = *a.size, epsilon = *a.epsilon;
    const float kept = __fsub_rn(1.0f, __fmul_rn(*a.lr, a.weight_decay));
    const unsigned key = narrow ? key_of(seed, salt) : 0u;
    const long long stride = static_cast<long long>(gridDim.x) * (threads / warp);
    for (long long block = blockIdx.x * static_cast<long long>(threads / warp) + threadIdx.x / warp; block < blocks;
         block += stride) {
        float m[quads][quad], v[quads][quad], p[quads][quad];
        float4 grads[quads];
        const long long at = block * block_size / quad + lane;
#pragma unroll
        for (int h = 0; h < quads; ++h) {
            grads[h] = reinterpret_cast<const float4 *>(a.grad)[at + h * warp];
            if constexpr (narrow) {
                const uint2 found = static_cast<const uint2 *>(master)[at + h * warp];
                p[h][0] = __uint_as_float(found.x << 16), p[h][1] = __uint_as_float(found.x & 0xffff0000u);
                p[h][2] = __uint_as_float(found.y << 16), p[h][3] = __uint_as_float(found.y & 0xffff0000u);
            } else {
                const float4 found = static_cast<const float4 *>(master)[at + h * warp];
                p[h][0] = found.x, p[h][1] = found.y, p[h][2] = found.z, p[h][3] = found.w;
            }
        }
        read<eight>(m, first, first_absmax, block, lane, tables.first_values);
        read<eight>(v, second, second_absmax, block, lane, tables.second_values);
#pragma unroll
        for (int h = 0; h < quads; ++h) {
            const float of_quad[quad] = {grads[h].x, grads[h].y, grads[h].z, grads[h].w};
#pragma unroll
            for (int j = 0; j < quad; ++j) {
                float g = __fmul_rn(of_quad[j], clip);
                if ((__float_as_uint(g) & infinity_bits) == infinity_bits) g = 0.0f;
                m[h][j] = __fmaf_rn(a.rest1, g, __fmul_rn(m[h][j], a.beta1));
                v[h][j] = __fmaf_rn(a.rest2, __fmul_rn(g, g), __fmul_rn(v[h][j], a.beta2));
                const float change = __fdiv_rn(m[h][j], __fadd_rn(__fsqrt_rn(v[h][j]), epsilon));
                p[h][j] = __fmul_rn(__fsub_rn(p[h][j], __fmul_rn(change, size)), kept);
            }
            if constexpr (narrow) {
                unsigned rounded[quad];
#pragma unroll
                for (int j = 0; j < quad; ++j) {
                    const unsigned place = static_cast<unsigned>((at + h * warp) * quad + j) + counted;
                    rounded[j] = stochastic_bf16(p[h][j], hash32(place ^ key));
                }
                static_cast<uint2 *>(master)[at + h * warp] =
                    make_uint2(rounded[0] | rounded[1] << 16, rounded[2] | rounded[3] << 16);
            } else {
                static_cast<float4 *>(master)[at + h * warp] = make_float4(p[h][0], p[h][1], p[h][2], p[h][3]);
            }
        }
        write<true, eight>(m, first, first_absmax, block, lane, tables);
        write<false, eight>(v, second, second_absmax, block, lane, tables);
    }
}

} // namespace surogate

// `skip` is not 0 where nothing may change. `seed`, `salt` and `counted`, the range's first element under that salt,
// are of bf16 masters.
#define SUROGATE_UPDATE(NAME, EIGHT, NARROW)                                                                           \
    extern "C" __global__ void __launch_bounds__(surogate::threads)                                                    \
        NAME(void *master, const float *grad, void *first, float *first_absmax, void *second, float *second_absmax,    \
             long long blocks, const float *lr, const float *clip, const float *skip, const float *size,               \
             const float *epsilon, float beta1, float rest1, float beta2, float rest2, float weight_decay,             \
             const surogate::Tables *tables, const int *seed, unsigned salt, unsigned counted) {                       \
        if (*skip != 0.0f) return;                                                                                     \
        surogate::update<EIGHT, NARROW>(                                                                               \
            master, first, first_absmax, second, second_absmax, blocks,                                                \
            {grad, lr, clip, size, epsilon, beta1, rest1, beta2, rest2, weight_decay}, tables, seed, salt, counted);   \
    }

SUROGATE_UPDATE(adamw_8bit_float32, true, false)
SUROGATE_UPDATE(adamw_8bit_bfloat16, true, true)
SUROGATE_UPDATE(adamw_8bit_small_float32, false, false)
SUROGATE_UPDATE(adamw_8bit_small_bfloat16, false, true)
