"""The backward of RMSNorm with a trained weight, in Triton: dx and the weight's gradient from one reading."""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_backward(
    dy,
    x,
    weight,
    inverse,
    other,
    dx,
    parts,
    tokens,
    features,
    dy_row,
    x_row,
    other_row,
    ADD: tl.constexpr,
    D: tl.constexpr,
):
    """A program has every n-th token, n the number of programs: dx, plus `other` if ADD, and its part of the weight's
    gradient.
    """
    first = tl.program_id(0)
    columns = tl.arange(0, D)
    inside = columns < features
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([D], tl.float32)
    for token in range(first, tokens, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        d = tl.load(dy + row * dy_row + columns, mask=inside, other=0.0).to(tl.float32)
        xhat = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(inverse + row)
        xhat *= scale
        dxhat = d * w
        mean = tl.sum(dxhat * xhat, axis=0) / features
        gradient = (dxhat - xhat * mean) * scale
        if ADD:
            gradient += tl.load(other + row * other_row + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row * features + columns, gradient.to(dx.dtype.element_ty), mask=inside)
        total += d * xhat
    tl.store(parts + first.to(tl.int64) * features + columns, total, mask=inside)
