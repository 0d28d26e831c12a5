"""SwiGLU in Triton. The backward: both gradients from one reading, side by side in one buffer."""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward_of_rows(gate, up, out, last, features, gate_row, up_row, ROWS: tl.constexpr, C: tl.constexpr):
    """A program has C features of ROWS rows: out = silu(gate) · up, rounded once, as Inductor does; `last`: the end of
    the rows that are read.
    """
    first = tl.program_id(0) * ROWS
    count = tl.minimum(ROWS, tl.load(last) - first)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    inside = columns < features
    for number in tl.range(0, count):
        row = first.to(tl.int64) + number
        g = tl.load(gate + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_row + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * features + columns, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gradients(dy, gate, up, place, features, inside):
    """Store both gradients of one row's features; the pointers are of its elements."""
    g = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    dgate = d * u * (sigmoid + silu * (1 - sigmoid))
    tl.store(place, dgate.to(place.dtype.element_ty), mask=inside)
    tl.store(place + features, (d * silu).to(place.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(dy, gate, up, out, features, dy_row, gate_row, up_row, out_row, C: tl.constexpr):
    """A program has C features of one token: out[n] = [dgate | dup | room]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    place = out + row * out_row + columns
    inside = columns < features
    gradients(
        dy + row * dy_row + columns,
        gate + row * gate_row + columns,
        up + row * up_row + columns,
        place,
        features,
        inside,
    )


@triton.jit
def backward_of_rows(
    dy, gate, up, out, last, features, dy_row, gate_row, up_row, out_row, ROWS: tl.constexpr, C: tl.constexpr
):
    """`swiglu_backward` of ROWS rows; `last`: the end of the rows that are read."""
    first = tl.program_id(0) * ROWS
    count = tl.minimum(ROWS, tl.load(last) - first)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    inside = columns < features
    for number in tl.range(0, count):
        row = first.to(tl.int64) + number
        place = out + row * out_row + columns
        mine = dy + row * dy_row + columns, gate + row * gate_row + columns, up + row * up_row + columns
        gradients(mine[0], mine[1], mine[2], place, features, inside)
