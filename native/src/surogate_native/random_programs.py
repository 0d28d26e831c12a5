"""The random bits of `surogate_core.kernels.ops.random_bits` in Triton."""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401  # Triton's interpreter looks for it


@triton.jit
def hash32(x):
    """`ops.hashed`, an avalanche of int32 bits."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261
    return x ^ ((x >> 16) & 0xFFFF)
