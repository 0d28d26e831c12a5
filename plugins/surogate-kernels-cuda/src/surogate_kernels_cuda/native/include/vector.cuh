// 16-byte loads and stores of a row, whatever its type and alignment.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace surogate {

// As many elements as 16 bytes hold.
template <typename T> struct alignas(16) Vector {
    static constexpr int width = 16 / sizeof(T);
    T values[width];
};

template <typename T> __device__ __forceinline__ float wide(T x) { return static_cast<float>(x); }
template <> __device__ __forceinline__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }
template <> __device__ __forceinline__ float wide(__half x) { return __half2float(x); }

template <typename T> __device__ __forceinline__ T narrow(float x) { return static_cast<T>(x); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half narrow(float x) { return __float2half_rn(x); }

// Elements before the first address of the row that is a multiple of 16 bytes; all of them if there is none.
template <typename T> __device__ __forceinline__ int unaligned(const T *row, int count) {
    const unsigned misfit = static_cast<unsigned>(reinterpret_cast<unsigned long long>(row) & 15u);
    const int before = misfit == 0 ? 0 : static_cast<int>((16u - misfit) / sizeof(T));
    return before < count ? before : count;
}

}  // namespace surogate
