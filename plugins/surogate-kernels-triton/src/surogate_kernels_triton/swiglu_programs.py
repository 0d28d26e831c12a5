"""The backward of SwiGLU in Triton: both gradients from one reading, side by side in one buffer."""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu_backward(dy, gate, up, out, features, dy_row, gate_row, up_row, out_row, C: tl.constexpr):
    """A program has C features of one token: out[n] = [dgate | dup | room]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    inside = columns < features
    g = tl.load(gate + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + columns, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * dy_row + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    dgate = d * u * (sigmoid + silu * (1 - sigmoid))
    place = out + row * out_row + columns
    tl.store(place, dgate.to(out.dtype.element_ty), mask=inside)
    tl.store(place + features, (d * silu).to(out.dtype.element_ty), mask=inside)
