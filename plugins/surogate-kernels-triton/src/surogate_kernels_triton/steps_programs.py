"""Decoding steps of recurrences in Triton: the states of slots are read once, moved on by a row, and written in place.

Each element of a state has one program, which reads it before it writes it, and no two rows have a slot, so nothing
races. Rows of the last slot do not count: they begin with zeros, which are not read, and write no state. Grids depend
on the number of rows alone. Arithmetic is fp32.

Names: N rows, S slots, H heads of values, SHARED of them for a key, E features of a key, F of a value, EP and FP powers
of two: FP columns of a value for a program; C channels for a program, W inputs of an output.
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from surogate_kernels_triton.scans_programs import state_of


@triton.jit
def scan_step(
    q,
    k,
    v,
    decay,
    beta,
    states,
    slots,
    y,
    last,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    decay_row,
    decay_head,
    beta_row,
    beta_head,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    EP: tl.constexpr,
    FP: tl.constexpr,
    DELTA: tl.constexpr,
):
    """Moves the states [S, H, E, F] of a row's slot on and fills y [N, H, F], for a head and FP columns."""
    parts: tl.constexpr = (F + FP - 1) // FP
    row = (tl.program_id(0) // (H * parts)).to(tl.int64)
    head = tl.program_id(0) // parts % H
    columns = tl.program_id(0) % parts * FP + tl.arange(0, FP)
    features = tl.arange(0, EP)
    slot = tl.load(slots + row)
    where, within = state_of(states, slot * H + head, features, columns, E, F)
    within = within & (slot < last)
    state = tl.load(where, mask=within, other=0.0)
    group = head // SHARED
    key = tl.load(k + row * k_row + group * k_head + features, mask=features < E, other=0.0).to(tl.float32)
    query = tl.load(q + row * q_row + group * q_head + features, mask=features < E, other=0.0).to(tl.float32)
    new = tl.load(v + row * v_row + head * v_head + columns, mask=columns < F, other=0.0).to(tl.float32)
    rate = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    state *= tl.exp(tl.load(decay + row * decay_row + head * decay_head).to(tl.float32))
    if DELTA:
        new -= tl.sum(state * key[:, None], 0)
    state += key[:, None] * (rate * new)[None, :]
    tl.store(where, state, mask=within)
    read = tl.sum(state * query[:, None], 0)
    tl.store(y + (row * H + head) * F + columns, read.to(y.dtype.element_ty), mask=columns < F)


@triton.jit
def convolution_step(x, weight, bias, states, slots, y, last, channels, x_row, W: tl.constexpr, C: tl.constexpr):
    """Moves the states [S, W - 1, channels] of a row's slot on and fills y [N, channels], for C channels. Products are
    rounded before they are added, oldest first, as in the reference.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    real = columns < channels
    slot = tl.load(slots + row)
    counts = real & (slot < last)
    place = states + slot * ((W - 1) * channels) + columns
    total = tl.zeros([C], tl.float32)
    for tap in tl.static_range(W - 1):
        value = tl.load(place + tap * channels, mask=counts, other=0.0)
        total += value * tl.load(weight + columns * W + tap, mask=real, other=0.0).to(tl.float32)
        if tap:
            tl.store(place + (tap - 1) * channels, value, mask=counts)
    value = tl.load(x + row * x_row + columns, mask=real, other=0.0).to(tl.float32)
    total += value * tl.load(weight + columns * W + (W - 1), mask=real, other=0.0).to(tl.float32)
    tl.store(place + (W - 2) * channels, value, mask=counts)
    if bias is not None:
        total += tl.load(bias + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(y + row * channels + columns, total.to(y.dtype.element_ty), mask=real)
