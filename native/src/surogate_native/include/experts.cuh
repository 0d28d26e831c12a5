// Weights of experts that lie at equal distances: blockIdx.z is the expert's number.
#pragma once

namespace surogate {

// An expert's part of what is at `first`, `stride` bytes apart.
template <typename T>
__device__ __forceinline__ T *of_expert(T *first, long long stride) {
    return reinterpret_cast<T *>(reinterpret_cast<unsigned long long>(first) + stride * blockIdx.z);
}

}  // namespace surogate
