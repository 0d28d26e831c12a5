"""Optimizer steps in Triton: every tensor read and written once."""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from surogate_native.random_programs import hash32


@triton.jit
def _stochastic_bf16(x, counter, key):
    """`rounding.stochastic_bf16` of fp32 x with the bits of elements `counter`."""
    whole = x.to(tl.int32, bitcast=True)
    raised = (whole + (hash32(counter ^ key) & 0xFFFF)) & -0x10000
    finite = (whole & 0x7F800000) != 0x7F800000
    return tl.where(finite, raised, whole).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def adamw_update(
    master,
    grad,
    first,
    second,
    lr,
    clip,
    skip,
    correction1,
    correction2,
    seed,
    salt,
    number,
    length,
    weight_decay,
    rest1,
    beta2,
    rest2,
    epsilon,
    NARROW: tl.constexpr,
    PERIOD: tl.constexpr,
    C: tl.constexpr,
):
    """A program has C elements under one salt, which PERIOD elements share. `number`: of the group's first element.
    `rest` is 1 − beta.
    """
    if tl.load(skip) != 0:
        return
    start = tl.program_id(0).to(tl.int64) * C
    place = start + tl.arange(0, C)
    inside = place < length
    rate = tl.load(lr)
    g = tl.load(grad + place, mask=inside, other=0.0) * tl.load(clip)
    m = tl.load(first + place, mask=inside, other=0.0)
    v = tl.load(second + place, mask=inside, other=0.0)
    p = tl.load(master + place, mask=inside, other=0.0).to(tl.float32)
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    divisor = tl.sqrt_rn(tl.div_rn(v, tl.load(correction2))) + epsilon
    p = p * (1 - rate * weight_decay) - tl.div_rn(rate * m, tl.load(correction1) * divisor)
    tl.store(first + place, m, mask=inside)
    tl.store(second + place, v, mask=inside)
    if NARROW:
        number += start
        key = hash32(tl.load(seed) + (salt + (number // PERIOD).to(tl.int32)) * 0x1E3779B9)
        counter = (number % PERIOD).to(tl.int32) + tl.arange(0, C)
        tl.store(master + place, _stochastic_bf16(p, counter, key), mask=inside)
    else:
        tl.store(master + place, p, mask=inside)


@triton.jit
def matrix_momentum(momentum, grad, offsets, clip, skip, rest, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """A program has SIZE of the COUNT elements of a matrix. `rest` is 1 − beta."""
    if tl.load(skip) != 0:
        return
    matrix = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = place < COUNT
    g = tl.load(grad + tl.load(offsets + matrix) + place, mask=inside, other=0.0) * tl.load(clip)
    finite = (g.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    g = tl.where(finite, g, 0.0)
    mine = momentum + matrix * COUNT + place
    m = tl.load(mine, mask=inside, other=0.0)
    tl.store(mine, m + rest * (g - m), mask=inside)


@triton.jit
def matrix_update(
    master,
    o,
    factor,
    offsets,
    lr,
    seed,
    salt,
    weight_decay,
    o_matrix,
    o_row,
    o_column,
    R: tl.constexpr,
    C: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    NARROW: tl.constexpr,
    PERIOD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program has a tile of a matrix; `o_…` are the strides of O, whose rows or columns lie close."""
    rate = tl.load(lr)
    if rate == 0:
        return
    matrix = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    place = rows[:, None] * C + columns[None, :]
    base = tl.load(offsets + matrix)
    mine = master + base + place
    w = tl.load(mine, mask=inside, other=0.0).to(tl.float32)
    share = o + matrix * o_matrix + rows[:, None].to(tl.int64) * o_row + columns[None, :].to(tl.int64) * o_column
    x = tl.load(share, mask=inside, other=0.0).to(tl.float32)
    f = tl.load(factor + matrix * R + rows, mask=rows < R, other=0.0) * rate
    change = x * f[:, None]
    decay = w * (rate * weight_decay)
    if CAUTIOUS:
        decay = tl.where(x * w >= 0, decay, 0.0)
    w -= change + decay
    if NARROW:
        # A matrix is under one salt, that of its first element, however far it reaches.
        key = hash32(tl.load(seed) + (salt + (base // PERIOD).to(tl.int32)) * 0x1E3779B9)
        counter = (base % PERIOD).to(tl.int32) + place
        tl.store(mine, _stochastic_bf16(w, counter, key), mask=inside)
    else:
        tl.store(mine, w, mask=inside)


@triton.jit
def add_tree_sum(total, p0, p1, p2, p3, p4, p5, p6, p7, length, N: tl.constexpr, C: tl.constexpr):
    """Add the sum of the first N parts: a binary tree if N is a power of two, else one after another."""
    place = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    inside = place < length
    x = tl.load(p0 + place, mask=inside, other=0.0) + tl.load(p1 + place, mask=inside, other=0.0)
    if N == 4 or N == 8:
        x += tl.load(p2 + place, mask=inside, other=0.0) + tl.load(p3 + place, mask=inside, other=0.0)
    elif N > 2:
        x += tl.load(p2 + place, mask=inside, other=0.0)
        if N > 3:
            x += tl.load(p3 + place, mask=inside, other=0.0)
        if N > 4:
            x += tl.load(p4 + place, mask=inside, other=0.0)
        if N > 5:
            x += tl.load(p5 + place, mask=inside, other=0.0)
        if N > 6:
            x += tl.load(p6 + place, mask=inside, other=0.0)
    if N == 8:
        y = tl.load(p4 + place, mask=inside, other=0.0) + tl.load(p5 + place, mask=inside, other=0.0)
        y += tl.load(p6 + place, mask=inside, other=0.0) + tl.load(p7 + place, mask=inside, other=0.0)
        x += y
    tl.store(total + place, tl.load(total + place, mask=inside, other=0.0) + x, mask=inside)
