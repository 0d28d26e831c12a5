"""The causal convolution of each channel over the runs of packed rows, in Triton.

Products are rounded before they are added (launches turn fused multiply-adds off), so results and gradients of inputs
have the bits of the reference. A program has R rows and C channels; it finds the runs of its rows itself.
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

RUNS = tl.constexpr(64)
"""Runs compared at a time."""


@triton.jit
def edges_of(borders, runs, rows, R: tl.constexpr):
    """(first row [R] of the run that each row is in, the end of its rows)."""
    begin = tl.zeros([R], tl.int32)
    end = tl.zeros([R], tl.int32)
    for first in range(0, runs, RUNS):
        run = first + tl.arange(0, RUNS)
        start = tl.load(borders + run, mask=run < runs, other=0)[None, :]
        stop = tl.load(borders + run + 1, mask=run < runs, other=0)[None, :]
        inside = (rows[:, None] >= start) & (rows[:, None] < stop)
        begin += tl.sum(tl.where(inside, start, 0), 1)
        end += tl.sum(tl.where(inside, stop, 0), 1)
    return begin, end


@triton.jit
def convolve(
    x,
    weight,
    bias,
    borders,
    runs,
    y,
    count,
    channels,
    x_row,
    W: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Fills y [N, C]."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    real = columns < channels
    begin, _end = edges_of(borders, runs, rows, R)
    total = tl.zeros([R, C], tl.float32)
    for tap in tl.static_range(W):
        source = rows - (W - 1) + tap
        inside = ((source >= begin) & (rows < count))[:, None] & real[None, :]
        value = tl.load(x + source.to(tl.int64)[:, None] * x_row + columns[None, :], mask=inside, other=0.0)
        total += value.to(tl.float32) * tl.load(weight + columns * W + tap, mask=real, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + columns, mask=real, other=0.0).to(tl.float32)
    inside = (rows < count)[:, None] & real[None, :]
    tl.store(y + rows.to(tl.int64)[:, None] * channels + columns[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def convolve_backward(
    dy,
    x,
    weight,
    borders,
    runs,
    dx,
    parts,
    count,
    channels,
    dy_row,
    x_row,
    W: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Fills dx [N, C] and, if wanted, parts [W + 1, programs of rows, C]: sums over a program's rows of the gradients
    of the weights, and of the bias.
    """
    rows = tl.program_id(0) * R + tl.arange(0, R)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    real = columns < channels
    begin, end = edges_of(borders, runs, rows, R)
    within = (rows < count)[:, None] & real[None, :]
    total = tl.zeros([R, C], tl.float32)
    for tap in tl.static_range(W):
        target = rows + (W - 1) - tap
        inside = ((target < end) & (rows < count))[:, None] & real[None, :]
        outer = tl.load(dy + target.to(tl.int64)[:, None] * dy_row + columns[None, :], mask=inside, other=0.0)
        total += outer.to(tl.float32) * tl.load(weight + columns * W + tap, mask=real, other=0.0).to(tl.float32)
    places = rows.to(tl.int64)[:, None]
    tl.store(dx + places * channels + columns[None, :], total.to(dx.dtype.element_ty), mask=within)
    if parts is not None:
        outer = tl.load(dy + places * dy_row + columns[None, :], mask=within, other=0.0).to(tl.float32)
        for tap in tl.static_range(W):
            source = rows - (W - 1) + tap
            inside = ((source >= begin) & (rows < count))[:, None] & real[None, :]
            value = tl.load(x + source.to(tl.int64)[:, None] * x_row + columns[None, :], mask=inside, other=0.0)
            found = tl.sum(outer * value.to(tl.float32), 0)
            tl.store(parts + (tap * tl.num_programs(0) + tl.program_id(0)) * channels + columns, found, mask=real)
        found = tl.sum(outer, 0)
        tl.store(parts + (W * tl.num_programs(0) + tl.program_id(0)) * channels + columns, found, mask=real)
