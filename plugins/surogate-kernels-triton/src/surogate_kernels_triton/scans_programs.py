"""Scans over the runs of packed rows in Triton: Mamba-2's and the gated delta rule; `scans_gradients_programs` has the
gradients.

    S ← exp(g) S;   n = β (v − Sᵀ k)  (delta rule)  or  n = β v;   S ← S + k nᵀ;   y = Sᵀ q

A run is cut into chunks of C rows, counted from its beginning (arXiv 2405.21060, arXiv 2412.06464). Programs of a chunk
and a head compute what needs no other chunk; a program of a run and a head carries the state from chunk to chunk. The
grid depends on the numbers of rows and runs alone: `scan_places` finds the chunks. Positions behind the end of a run
are zeros with no decay. Nothing is added atomically: each output element has one program and one order of summation.

In fp32 each decay between two positions is a sum of its own, as in the reference: the difference of two sums from the
beginning would lose a small one behind a large one. Where operands are rounded to 8 or 11 bits, it is that difference,
of decays that are at least RESET: such sums of 128 are above -5120 and have an error of 2⁻¹² at most in one rounding.
Up to rounding no exponential is of a positive number.

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
BLOCK = tl.constexpr(16)
"""Rows of a block that a single warp inverts."""
RESET = tl.constexpr(-40.0)
"""A decay to less than 2⁻⁵⁷: between positions of a chunk, smaller ones count as this one."""


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
def scan_decays(decay, table, places, since, to_end, through, H: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """The decays of B heads of a chunk: since its beginning [N, H], up to its end [N, H] and through it [P, H]."""
    blocks: tl.constexpr = (H + B - 1) // B
    place = tl.program_id(0) // blocks
    heads = tl.program_id(0) % blocks * B + tl.arange(0, B)
    begin = tl.load(table + place)
    end = tl.load(table + places + place)
    if begin < end:
        rows = begin + tl.arange(0, C)
        at = rows.to(tl.int64)[:, None] * H + heads[None, :]
        real = (rows < end)[:, None] & (heads < H)[None, :]
        g = tl.load(decay + at, mask=real, other=0.0).to(tl.float32)
        # `end` is that of the chunk: the row behind it is of the next one.
        inside = (rows + 1 < end)[:, None] & real
        behind = tl.load(decay + at + H, mask=inside, other=0.0).to(tl.float32)
        tl.store(since + at, tl.exp(tl.cumsum(g, 0)), mask=real)
        tl.store(to_end + at, tl.exp(tl.cumsum(behind, 0, reverse=True)), mask=real)
        tl.store(through + place.to(tl.int64) * H + heads, tl.exp(tl.sum(g, 0)), mask=heads < H)


@triton.jit
def dot_of(a, b, D: tl.constexpr, WIDE: tl.constexpr):
    """a b in fp32, of operands rounded to D."""
    if WIDE:
        product = tl.dot(a.to(D).to(tl.float32), b.to(D).to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a.to(D), b.to(D), input_precision="ieee")
    return product


@triton.jit
def tile_of(x, begin, real, stride, columns, width):
    """The rows from `begin` on, of columns; zeros where there is no row or column."""
    inside = real[:, None] & (columns < width)[None, :]
    rows = begin + tl.arange(0, real.shape[0])
    places = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(x + places, mask=inside, other=0.0)


@triton.jit
def write_tile(x, value, begin, real, stride, columns, width):
    """Write rows of columns."""
    inside = real[:, None] & (columns < width)[None, :]
    rows = begin + tl.arange(0, real.shape[0])
    places = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(x + places, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def state_of(x, number, lines, columns, E, F):
    """(places, mask) of the state of a chunk and a head in [P · H, E, F]."""
    places = x + (number.to(tl.int64) * (E * F) + lines.to(tl.int64)[:, None] * F + columns[None, :])
    return places, (lines < E)[:, None] & (columns < F)[None, :]


@triton.jit
def read_state(x, number, lines, columns, E, F):
    """The state of a chunk and a head; zeros where it has no line or column."""
    places, within = state_of(x, number, lines, columns, E, F)
    return tl.load(places, mask=within, other=0.0)


@triton.jit
def square_of(x, number, C: tl.constexpr):
    """The places of a matrix of a chunk and a head in [P · H, C, C]."""
    return x + number.to(tl.int64) * (C * C) + (tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def column_of(x, rows, real, heads, head):
    """A head's numbers of the rows in [N, H], in fp32."""
    return tl.load(x + rows.to(tl.int64) * heads + head, mask=real, other=0.0).to(tl.float32)


@triton.jit
def decays_between(g, C: tl.constexpr, D: tl.constexpr):
    """[C, C]: the decay from the position j to the position i; 0 where j is behind i. See the top of the file."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    if tl.float32 == D:
        sums = tl.cumsum(tl.where(i > j, g[:, None], 0.0), 0)
    else:
        since = tl.cumsum(tl.maximum(g, RESET), 0)
        sums = tl.where(i > j, since[:, None] - since[None, :], 0.0)
    return tl.where(i >= j, tl.exp(sums), 0.0)


@triton.jit
def decays_between_transposed(g, C: tl.constexpr, D: tl.constexpr):
    """[C, C]: the decay from the position i to the position j; 0 where i is behind j."""
    if tl.float32 == D:
        between = tl.trans(decays_between(g, C, D))
    else:
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        since = tl.cumsum(tl.maximum(g, RESET), 0)
        between = tl.where(i <= j, tl.exp(tl.where(i < j, since[None, :] - since[:, None], 0.0)), 0.0)
    return between


@triton.jit
def doubled(found, a, SIZE: tl.constexpr, SOLVE: tl.constexpr, B: tl.constexpr):
    """Inverses of blocks of SIZE on the diagonal of 1 + a, joined to those of blocks twice as large; a has B rows."""
    i = tl.arange(0, B)[:, None]
    j = tl.arange(0, B)[None, :]
    below = tl.where((i // SIZE == j // SIZE + 1) & (i // SIZE % 2 == 1), a, 0.0)
    right = tl.dot(below, found, input_precision=SOLVE)
    return found - tl.dot(found, right, input_precision=SOLVE)


@triton.jit
def delta_systems(
    k,
    decay,
    beta,
    table,
    places,
    systems,
    corrections,
    k_row,
    k_head,
    H: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    EP: tl.constexpr,
    FP: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The delta rule's systems 1 + a of the chunks and heads: a [P, H, C, C], strictly lower triangular, in fp32."""
    D: tl.constexpr = corrections.dtype.element_ty
    place = tl.program_id(0) // H
    head = tl.program_id(0) % H
    begin = tl.load(table + place)
    end = tl.load(table + places + place)
    if begin < end:
        rows = begin + tl.arange(0, C)
        real = rows < end
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        keys = tile_of(k + head // SHARED * k_head, begin, real, k_row, tl.arange(0, EP), E)
        rate = column_of(beta, rows, real, H, head)
        between = decays_between(column_of(decay, rows, real, H, head), C, D)
        likeness = dot_of(keys, tl.trans(keys), D, WIDE)
        tl.store(square_of(systems, tl.program_id(0), C), tl.where(i > j, rate[:, None] * likeness * between, 0.0))


@triton.jit
def delta_blocks(systems, table, places, H: tl.constexpr, C: tl.constexpr, SOLVE: tl.constexpr):
    """Replaces a block on the diagonal of a by its inverse in 1 + a, joined from those of blocks of half the size.

    This and `delta_inverses` are products of small blocks one after the other, so a program is a single warp: many of
    them share a multiprocessor.
    """
    B: tl.constexpr = BLOCK
    blocks: tl.constexpr = C // B
    chunk = tl.program_id(0) // blocks
    number = tl.program_id(0) % blocks
    place = chunk // H
    if tl.load(table + place) < tl.load(table + places + place):
        i = tl.arange(0, B)[:, None]
        j = tl.arange(0, B)[None, :]
        own = systems + chunk.to(tl.int64) * (C * C) + number * (B * C + B) + i * C + j
        block = tl.load(own)
        found = tl.where(i == j, 1.0, 0.0) - tl.where((i == j + 1) & (i % 2 == 1), block, 0.0)
        for doubling in tl.static_range(1, 4):
            found = doubled(found, block, 1 << doubling, SOLVE, B)
        tl.store(own, found)


@triton.jit
def delta_inverses(systems, table, places, inverses, H: tl.constexpr, C: tl.constexpr, SOLVE: tl.constexpr):
    """(1 + a)⁻¹ [P, H, C, C] of every chunk and head, after `delta_blocks`: B columns, B rows of them at a time."""
    B: tl.constexpr = BLOCK
    blocks: tl.constexpr = C // B
    chunk = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks
    place = chunk // H
    if tl.load(table + place) < tl.load(table + places + place):
        whole = tl.arange(0, C)[:, None]
        i = tl.arange(0, B)[:, None]
        j = tl.arange(0, B)[None, :]
        start = systems + chunk.to(tl.int64) * (C * C)
        own = whole // B == first
        found = tl.load(start + whole * C + first * B + j, mask=own, other=0.0)
        for number in range(first + 1, blocks):
            lines = start + (number * B + i) * C
            # The columns from this block on meet zeros.
            right = tl.dot(tl.load(lines + tl.arange(0, C)[None, :]), found, input_precision=SOLVE)
            part = tl.dot(tl.load(lines + number * B + j), right, input_precision=SOLVE)
            part = tl.reshape(tl.broadcast_to(part[None, :, :], [blocks, B, B]), [C, B])
            found = tl.where(whole // B == number, -part, found)
        columns = inverses + chunk.to(tl.int64) * (C * C) + whole * C + first * B + j
        tl.store(columns, found.to(inverses.dtype.element_ty))


@triton.jit
def delta_values(
    k,
    v,
    since,
    beta,
    inverses,
    table,
    places,
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
    WIDE: tl.constexpr,
):
    """Solutions of the delta rule's systems: corrections [N, H, E], what the rule takes of the state that enters the
    chunk; and values [N, H, F], the new ones of a state of zeros.
    """
    D: tl.constexpr = values.dtype.element_ty
    place = tl.program_id(0) // H
    head = tl.program_id(0) % H
    begin = tl.load(table + place)
    end = tl.load(table + places + place)
    if begin < end:
        rows = begin + tl.arange(0, C)
        real = rows < end
        inverse = tl.load(square_of(inverses, tl.program_id(0), C))
        rate = column_of(beta, rows, real, H, head)
        read = rate * column_of(since, rows, real, H, head)
        for first in range(0, E, FP):
            features = first + tl.arange(0, FP)
            keys = tile_of(k + head // SHARED * k_head, begin, real, k_row, features, E).to(tl.float32)
            seen = dot_of(inverse, read[:, None] * keys, D, WIDE)
            write_tile(corrections + head * E, seen, begin, real, H * E, features, E)
        for first in range(0, F, FP):
            columns = first + tl.arange(0, FP)
            value = tile_of(v + head * v_head, begin, real, v_row, columns, F).to(tl.float32)
            new = dot_of(inverse, rate[:, None] * value, D, WIDE)
            write_tile(values + head * F, new, begin, real, H * F, columns, F)


@triton.jit
def scan_states(
    k,
    v,
    to_end,
    through,
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
    state = tl.zeros([EP, FP], tl.float32)
    if initial is not None:
        state += read_state(initial, run * H + head, features, columns, E, F).to(tl.float32)
    # Decays are read a chunk ahead: all else waits for them.
    rows = begin + tl.arange(0, C)
    rest = column_of(to_end, rows, rows < end, H, head)
    whole = tl.load(through + place * H + head, mask=begin < end, other=0.0)
    for first in range(begin, end, C):
        places, within = state_of(states, place * H + head, features, columns, E, F)
        tl.store(places, state.to(D), mask=within)
        rows = first + tl.arange(0, C)
        real = rows < end
        keys = tile_of(k + head // SHARED * k_head, first, real, k_row, features, E)
        next_rest = column_of(to_end, rows + C, rows + C < end, H, head)
        next_whole = tl.load(through + (place + 1) * H + head, mask=first + C < end, other=0.0)
        if DELTA:
            taken = tile_of(corrections + head * E, first, real, H * E, features, E)
            new = tile_of(values + head * F, first, real, H * F, columns, F).to(tl.float32) - dot_of(
                taken, state, D, WIDE
            )
            write_tile(values + head * F, new, first, real, H * F, columns, F)
        else:
            rate = column_of(beta, rows, real, H, head)
            new = rate[:, None] * tile_of(v + head * v_head, first, real, v_row, columns, F).to(tl.float32)
        state = whole * state + dot_of(tl.trans(keys), rest[:, None] * new, D, WIDE)
        place += 1
        rest = next_rest
        whole = next_whole
    if finals is not None:
        places, within = state_of(finals, run * H + head, features, columns, E, F)
        tl.store(places, state, mask=within)


@triton.jit
def scan_outputs(
    q,
    k,
    v,
    decay,
    since,
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
        queries = tile_of(q + head // SHARED * q_head, begin, real, q_row, features, E)
        keys = tile_of(k + head // SHARED * k_head, begin, real, k_row, features, E)
        g = column_of(decay, rows, real, H, head)
        read = column_of(since, rows, real, H, head)
        rate = column_of(beta, rows, real, H, head)
        weights = (dot_of(queries, tl.trans(keys), D, WIDE) * decays_between(g, C, D)).to(D)
        for first in range(0, F, FP):
            columns = first + tl.arange(0, FP)
            state = read_state(states, tl.program_id(0), features, columns, E, F)
            if DELTA:
                new = tile_of(values + head * F, begin, real, H * F, columns, F)
            else:
                new = (rate[:, None] * tile_of(v + head * v_head, begin, real, v_row, columns, F).to(tl.float32)).to(D)
            found = read[:, None] * dot_of(queries, state, D, WIDE) + dot_of(weights, new, D, WIDE)
            write_tile(y + head * F, found, begin, real, H * F, columns, F)
