// The figures of up to four ranges of columns of a bf16 matrix, before their codes are made: the kernel `begin`.
#pragma once
#include "codes.cuh"

// A block a range. Only before there are scales it reads the matrix: that is one step of a run.
extern "C" __global__ void __launch_bounds__(1024)
    begin(const unsigned short *x, long long x_row, int rows, const float *r0, const float *r1, const float *r2,
          const float *r3, int role, int e0, int e1, int e2, int e3, float limit, float factor, float *figures) {
    using namespace surogate;
    __shared__ unsigned most;
    const int slot = blockIdx.x;
    const float *row = slot == 0 ? r0 : slot == 1 ? r1 : slot == 2 ? r2 : r3;
    const float scale = row[role];
    float *own = figures + figures_of_one * slot;
    if (scale > 0.0f) {
        if (threadIdx.x == 0) begin_figures(scale, 0.0f, limit, factor, own);
        return;
    }
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    const int from = slot == 0 ? 0 : slot == 1 ? e0 : slot == 2 ? e1 : e2;
    const int chunks = ((slot == 0 ? e0 : slot == 1 ? e1 : slot == 2 ? e2 : e3) - from) / 8;
    unsigned pairs = 0;
    for (long long i = threadIdx.x; i < static_cast<long long>(rows) * chunks; i += 1024) {
        const uint4 v = __ldg(reinterpret_cast<const uint4 *>(x + i / chunks * x_row + from + i % chunks * 8));
        pairs = larger(larger(larger(larger(pairs, v.x), v.y), v.z), v.w);
    }
    const unsigned high = pairs & 0xffff0000u, low = pairs << 16;
    atomicMax(&most, __reduce_max_sync(~0u, high > low ? high : low));
    __syncthreads();
    if (threadIdx.x == 0) begin_figures(0.0f, __uint_as_float(most), limit, factor, own);
}
