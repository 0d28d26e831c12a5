"""Scans over the runs of packed rows in Triton: Mamba-2's and the gated delta rule; `scans_gradients_programs` has the
gradients.

    S ← exp(g) S;   n = β (v − Sᵀ k)  (delta rule)  or  n = β v;   S ← S + k nᵀ;   y = Sᵀ q

A run is cut into chunks of C rows, counted from its beginning (arXiv 2405.21060, arXiv 2412.06464). Programs of a chunk
and a head compute what needs no other chunk; a program of a run and a head carries the state from chunk to chunk. The
grid depends on the numbers of rows and runs alone: `scan_places` finds the chunks. Positions behind the end of a run
are zeros with no decay. Nothing is added atomically: each output element has one program and one order of summation.

Each decay between two positions is a sum of its own, as in the reference: the difference of two sums from the beginning
would lose a small one behind a large one. No exponential is of a positive number.

Products multiply operands rounded to D, the dtype of the workspaces, and add in fp32; with WIDE, for Triton's
interpreter, the rounded operands are multiplied in fp32. States are fp32 while they are carried.

Names: N rows, R runs, P places of chunks, C rows of a chunk, G heads of keys, H of values, SHARED = H / G, E features
of a key, F of a value, EP and FP powers of two: FP columns of a value at a time.
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

RUNS = tl.constexpr(64)
"""Runs compared at a time."""


@triton.jit
def scan_places(borders, runs, table, before, places, C: tl.constexpr, B: tl.constexpr):
    """Fills table [2, P]: the first row of each chunk and the end of its rows, 0 and 0 where there is no chunk; and
    before [R]: the chunks before each run.
    """
    number = tl.program_id(0) * B + tl.arange(0, B)
    begin = tl.zeros([B], tl.int32)
    end = tl.zeros([B], tl.int32)
    total = 0
    for first in range(0, runs, RUNS):
        run = first + tl.arange(0, RUNS)
        start = tl.load(borders + run, mask=run < runs, other=0)
        stop = tl.load(borders + run + 1, mask=run < runs, other=0)
        count = (stop - start + C - 1) // C
        behind = total + tl.cumsum(count, 0)
        ahead = behind - count
        if tl.program_id(0) == 0:
            tl.store(before + run, ahead, mask=run < runs)
        inside = (number[:, None] >= ahead[None, :]) & (number[:, None] < behind[None, :])
        row = start[None, :] + (number[:, None] - ahead[None, :]) * C
        begin += tl.sum(tl.where(inside, row, 0), 1)
        end += tl.sum(tl.where(inside, tl.minimum(row + C, stop[None, :]), 0), 1)
        total += tl.sum(count, 0)
    tl.store(table + number, begin, mask=number < places)
    tl.store(table + places + number, end, mask=number < places)


@triton.jit
def dot_of(a, b, D: tl.constexpr, WIDE: tl.constexpr):
    """a b in fp32, of operands rounded to D."""
    if WIDE:
        product = tl.dot(a.to(D).to(tl.float32), b.to(D).to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a.to(D), b.to(D), input_precision="ieee")
    return product


@triton.jit
def tile_of(x, rows, real, stride, columns, width):
    """Rows of columns; zeros where there is no row or column."""
    inside = real[:, None] & (columns < width)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def write_tile(x, value, rows, real, stride, columns, width):
    """Write rows of columns."""
    inside = real[:, None] & (columns < width)[None, :]
    tl.store(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def state_of(number, lines, columns, E, F):
    """(places, mask) of the state of a chunk and a head in [P · H, E, F]."""
    places = number.to(tl.int64) * (E * F) + lines.to(tl.int64)[:, None] * F + columns[None, :]
    return places, (lines < E)[:, None] & (columns < F)[None, :]


@triton.jit
def column_of(x, rows, real, heads, head):
    """A head's numbers of the rows in [N, H], in fp32."""
    return tl.load(x + rows.to(tl.int64) * heads + head, mask=real, other=0.0).to(tl.float32)


@triton.jit
def decays_of(decay, rows, end, heads, head, C: tl.constexpr):
    """(logarithms g [C], decay since the beginning of the chunk [C], decay up to its end [C], through it)."""
    g = column_of(decay, rows, rows < end, heads, head)
    behind = column_of(decay, rows + 1, rows + 1 < end, heads, head)
    # The row behind the chunk is of the next one.
    behind = tl.where(tl.arange(0, C) < C - 1, behind, 0.0)
    since = tl.exp(tl.cumsum(g, 0))
    to_end = tl.exp(tl.cumsum(behind, 0, reverse=True))
    return g, since, to_end, tl.exp(tl.sum(g, 0))


@triton.jit
def decays_between(g, C: tl.constexpr):
    """[C, C]: the decay from the position j to the position i; 0 where j is behind i."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    sums = tl.cumsum(tl.where(i > j, g[:, None], 0.0), 0)
    return tl.where(i >= j, tl.exp(sums), 0.0)


@triton.jit
def doubled(found, a, SIZE: tl.constexpr, SOLVE: tl.constexpr, B: tl.constexpr):
    """Inverses of blocks of SIZE on the diagonal of 1 + a, joined to those of blocks twice as large; a has B rows."""
    i = tl.arange(0, B)[:, None]
    j = tl.arange(0, B)[None, :]
    below = tl.where((i // SIZE == j // SIZE + 1) & (i // SIZE % 2 == 1), a, 0.0)
    right = tl.dot(below, found, input_precision=SOLVE)
    return found - tl.dot(found, right, input_precision=SOLVE)


@triton.jit
def inverse_of(a, C: tl.constexpr, DOUBLINGS: tl.constexpr, SOLVE: tl.constexpr):
    """(1 + a)⁻¹ of a strictly lower triangular matrix [C, C]: inverses of blocks on the diagonal are joined to inverses
    of blocks twice as large, up to 16 rows in products of that size alone.
    """
    B: tl.constexpr = 16
    P: tl.constexpr = C // B
    same = (tl.arange(0, P)[:, None] == tl.arange(0, P)[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(same, tl.reshape(a, [P, B, P, B]), 0.0), 2)
    i = tl.arange(0, B)[:, None]
    j = tl.arange(0, B)[None, :]
    small = tl.where(i == j, 1.0, 0.0)[None, :, :] - tl.where((i == j + 1) & (i % 2 == 1), blocks, 0.0)
    for doubling in tl.static_range(1, 4):
        small = doubled(small, blocks, 1 << doubling, SOLVE, B)
    found = tl.reshape(tl.where(same, small[:, :, None, :], 0.0), [C, C])
    for doubling in tl.static_range(4, DOUBLINGS):
        found = doubled(found, a, 1 << doubling, SOLVE, C)
    return found


@triton.jit
def delta_system(
    k,
    v,
    decay,
    beta,
    table,
    places,
    inverses,
    corrections,
    values,
    k_row,
    k_head,
    v_row,
    v_head,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    EP: tl.constexpr,
    FP: tl.constexpr,
    C: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    SOLVE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Solves the delta rule's system of a chunk and a head: inverses [P, H, C, C], if wanted; corrections [N, H, E],
    what the rule takes of the state that enters the chunk; and values [N, H, F], the new ones of a state of zeros.
    """
    D: tl.constexpr = values.dtype.element_ty
    place = tl.program_id(0) // H
    head = tl.program_id(0) % H
    begin = tl.load(table + place)
    end = tl.load(table + places + place)
    if begin < end:
        rows = begin + tl.arange(0, C)
        real = rows < end
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        features = tl.arange(0, EP)
        keys = tile_of(k + head // SHARED * k_head, rows, real, k_row, features, E)
        g, since, _to_end, _through = decays_of(decay, rows, end, H, head, C)
        rate = column_of(beta, rows, real, H, head)
        likeness = dot_of(keys, tl.trans(keys), D, WIDE)
        system = tl.where(i > j, rate[:, None] * likeness * decays_between(g, C), 0.0)
        inverse = inverse_of(system, C, DOUBLINGS, SOLVE)
        if inverses is not None:
            square = tl.program_id(0).to(tl.int64) * (C * C) + i * C + j
            tl.store(inverses + square, inverse.to(D))
        seen = dot_of(inverse, (rate * since)[:, None] * keys, D, WIDE)
        write_tile(corrections + head * E, seen, rows, real, H * E, features, E)
        for first in range(0, F, FP):
            columns = first + tl.arange(0, FP)
            value = tile_of(v + head * v_head, rows, real, v_row, columns, F)
            new = dot_of(inverse, rate[:, None] * value, D, WIDE)
            write_tile(values + head * F, new, rows, real, H * F, columns, F)


@triton.jit
def scan_states(
    k,
    v,
    decay,
    beta,
    corrections,
    values,
    borders,
    before,
    initial,
    states,
    finals,
    k_row,
    k_head,
    v_row,
    v_head,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    EP: tl.constexpr,
    FP: tl.constexpr,
    C: tl.constexpr,
    DELTA: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Carries the state of a run and a head, FP columns of it: states [P, H, E, F], which enter the chunks; finals
    [R, H, E, F], if wanted. Of the delta rule also values [N, H, F]: from those of a state of zeros to the new ones.
    """
    D: tl.constexpr = states.dtype.element_ty
    parts: tl.constexpr = (F + FP - 1) // FP
    run = tl.program_id(0) // (H * parts)
    head = tl.program_id(0) // parts % H
    columns = tl.program_id(0) % parts * FP + tl.arange(0, FP)
    features = tl.arange(0, EP)
    begin = tl.load(borders + run)
    end = tl.load(borders + run + 1)
    place = tl.load(before + run)
    edge, within = state_of(run * H + head, features, columns, E, F)
    state = tl.zeros([EP, FP], tl.float32)
    if initial is not None:
        state += tl.load(initial + edge, mask=within, other=0.0).to(tl.float32)
    for first in range(begin, end, C):
        where, within = state_of(place * H + head, features, columns, E, F)
        tl.store(states + where, state.to(D), mask=within)
        rows = first + tl.arange(0, C)
        real = rows < end
        keys = tile_of(k + head // SHARED * k_head, rows, real, k_row, features, E)
        _g, _since, to_end, through = decays_of(decay, rows, end, H, head, C)
        if DELTA:
            taken = tile_of(corrections + head * E, rows, real, H * E, features, E)
            new = tile_of(values + head * F, rows, real, H * F, columns, F).to(tl.float32) - dot_of(
                taken, state, D, WIDE
            )
            write_tile(values + head * F, new, rows, real, H * F, columns, F)
        else:
            rate = column_of(beta, rows, real, H, head)
            new = rate[:, None] * tile_of(v + head * v_head, rows, real, v_row, columns, F).to(tl.float32)
        state = through * state + dot_of(tl.trans(keys), to_end[:, None] * new, D, WIDE)
        place += 1
    if finals is not None:
        tl.store(finals + edge, state, mask=within)


@triton.jit
def scan_outputs(
    q,
    k,
    v,
    decay,
    beta,
    values,
    table,
    places,
    states,
    y,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    EP: tl.constexpr,
    FP: tl.constexpr,
    C: tl.constexpr,
    DELTA: tl.constexpr,
    WIDE: tl.constexpr,
):
    """y [N, H, F]: what the queries of a chunk and a head read."""
    D: tl.constexpr = states.dtype.element_ty
    place = tl.program_id(0) // H
    head = tl.program_id(0) % H
    begin = tl.load(table + place)
    end = tl.load(table + places + place)
    if begin < end:
        rows = begin + tl.arange(0, C)
        real = rows < end
        features = tl.arange(0, EP)
        queries = tile_of(q + head // SHARED * q_head, rows, real, q_row, features, E)
        keys = tile_of(k + head // SHARED * k_head, rows, real, k_row, features, E)
        g, since, _to_end, _through = decays_of(decay, rows, end, H, head, C)
        rate = column_of(beta, rows, real, H, head)
        weights = (dot_of(queries, tl.trans(keys), D, WIDE) * decays_between(g, C)).to(D)
        for first in range(0, F, FP):
            columns = first + tl.arange(0, FP)
            where, within = state_of(tl.program_id(0), features, columns, E, F)
            state = tl.load(states + where, mask=within, other=0.0)
            if DELTA:
                new = tile_of(values + head * F, rows, real, H * F, columns, F)
            else:
                new = (rate[:, None] * tile_of(v + head * v_head, rows, real, v_row, columns, F).to(tl.float32)).to(D)
            found = since[:, None] * dot_of(queries, state, D, WIDE) + dot_of(weights, new, D, WIDE)
            write_tile(y + head * F, found, rows, real, H * F, columns, F)
