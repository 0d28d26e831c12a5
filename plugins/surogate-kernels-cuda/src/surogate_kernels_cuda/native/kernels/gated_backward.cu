// SwiGLU's backward with the skinny products around it, in bf16: dgate and dup side by side, dy [N, 2F].

#include "gated.cuh"

namespace surogate {

struct Rows {
    u16 *dy;
    long long dy_row;
    char *at;
    long long up;  // bytes between dgate and dup
    __device__ __forceinline__ void begin(int row, int column, int features) {
        at = reinterpret_cast<char *>(dy + row * dy_row + column);
        up = 2ll * features;
    }
    __device__ __forceinline__ void store(int, const u32 (&dgate)[4], const u32 (&dup)[4], bool inside) {
        if (inside) {
            *reinterpret_cast<uint4 *>(at) = make_uint4(dgate[0], dgate[1], dgate[2], dgate[3]);
            *reinterpret_cast<uint4 *>(at + up) = make_uint4(dup[0], dup[1], dup[2], dup[3]);
        }
        at += step * dy_row;  // 8 rows
    }
    __device__ __forceinline__ void next() {}
};

}  // namespace surogate

#define SUROGATE_GATED(name, stages)                                                                                   \
    extern "C" __global__ void __launch_bounds__(surogate::threads, 2)                                                 \
        name(surogate::u16 *dy, long long dy_row, SUROGATE_GATED_ARGUMENTS) {                                          \
        surogate::Rows out{dy, dy_row};                                                                                \
        surogate::gated<stages>(SUROGATE_GATED_OF, out);                                                               \
    }

SUROGATE_GATED(gated_backward, 2)
SUROGATE_GATED(gated_backward_small, 1)  // where a block cannot have so much shared memory
