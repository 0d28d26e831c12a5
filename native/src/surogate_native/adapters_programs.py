"""The skinny products of LoRA on panels, in Triton: each large matrix is read once and nothing is added atomically.

Names: N tokens, IN inputs, OUT outputs, S projections of a panel, R rank of each, M, K, C sizes of a
tile's rows, inner steps and columns. Sums that run over programs are written as parts and added in
one order by a second kernel. See `surogate_core.kernels.panels` for the panel.
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from surogate_native.random_programs import hash32


@triton.jit
def _kept(rows, columns, seed, slot, salts, threshold, IN: tl.constexpr):
    """`ops.dropout_mask_of_rows` of a tile of [N, IN]; `salts` holds each projection's share of the key."""
    key = hash32(tl.load(seed) + tl.load(salts + slot))
    counter = (tl.load(seed + 1) + rows)[:, None] * IN + columns[None, :]
    return hash32(counter ^ key) >= threshold


@triton.jit
def down(
    x,
    a,
    u,
    wide,
    seed,
    salts,
    threshold,
    inverse,
    tokens,
    x_row,
    a_row,
    wide_row,
    IN: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    DROP: tl.constexpr,
):
    """u[N, S·R] = dropout(x) Aᵀ of one projection; once more into the columns past x in its own rows."""
    slot = tl.program_id(0) % S
    rows = tl.program_id(0) // S * M + tl.arange(0, M)
    inside = rows < tokens
    ranks = slot * R + tl.arange(0, R)
    acc = tl.zeros([M, R], tl.float32)
    for first in tl.range(0, IN, K):
        columns = first + tl.arange(0, K)
        offsets = rows.to(tl.int64)[:, None] * x_row + columns[None, :]
        value = tl.load(x + offsets, mask=inside[:, None] & (columns < IN)[None, :], other=0.0)
        if DROP:
            kept = _kept(rows, columns, seed, slot, salts, threshold, IN)
            value = tl.where(kept, value.to(tl.float32) * inverse, 0.0).to(value.dtype)
        weight = tl.load(a + ranks[:, None] * a_row + columns[None, :], mask=(columns < IN)[None, :], other=0.0)
        acc = tl.dot(value, weight.T, acc)
    result = acc.to(u.dtype.element_ty)
    tl.store(u + rows[:, None] * (S * R) + ranks[None, :], result, mask=inside[:, None])
    tl.store(wide + rows.to(tl.int64)[:, None] * wide_row + ranks[None, :], result, mask=inside[:, None])


@triton.jit
def down_split(
    x,
    a,
    u,
    wide,
    parts,
    counters,
    largest,
    tokens,
    x_row,
    a_row,
    wide_row,
    IN: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    COPIES: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """`down` without dropout, for few rows: PART inputs a program. parts [tiles·S, IN/PART, M, R].

    COPIES: x is also written to the IN columns before those of u in `wide`. LARGEST: the bits of the largest absolute
    value of each program's bf16 are written to `largest` [tiles·S, IN/PART]; those of NaN are larger than all others.

    The last to come of those that share a tile adds their parts in a fixed order, whoever it is. PARTS: a power of two
    from IN/PART on. `counters` are 0 at the start, one for each tile and projection, and 0 again at the end.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    slot = tile % S
    rows = tile // S * M + tl.arange(0, M)
    inside = rows < tokens
    ranks = slot * R + tl.arange(0, R)
    acc = tl.zeros([M, R], tl.float32)
    most = tl.zeros([M, K], tl.int32)
    for start in tl.range(0, PART, K):
        columns = part * PART + start + tl.arange(0, K)
        offsets = rows.to(tl.int64)[:, None] * x_row + columns[None, :]
        value = tl.load(x + offsets, mask=inside[:, None] & (columns < IN)[None, :], other=0.0)
        weight = tl.load(a + ranks[:, None] * a_row + columns[None, :], mask=(columns < IN)[None, :], other=0.0)
        if COPIES:
            copied = inside & (slot == 0)
            to = wide + rows.to(tl.int64)[:, None] * wide_row - IN + columns[None, :]
            tl.store(to, value, mask=copied[:, None] & (columns < IN)[None, :])
        if LARGEST:
            most = tl.maximum(most, value.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF)
        acc = tl.dot(value, weight.T, acc)
    if LARGEST:
        tl.store(largest + tile * tl.num_programs(1) + part, tl.max(tl.max(most, axis=1), axis=0))
    place = tl.arange(0, M)[:, None] * R + tl.arange(0, R)[None, :]
    own = parts + tile * (tl.num_programs(1) * M * R)
    tl.store(own + part * (M * R) + place, acc)
    tl.debug_barrier()  # every thread's share is written before the program is counted
    if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
        flat = tl.arange(0, M * R)
        numbers = tl.arange(0, PARTS)[:, None]
        # At once: one after the other would wait for memory as often as there are parts.
        all_parts = tl.load(
            own + numbers * (M * R) + flat[None, :], mask=numbers < tl.num_programs(1), other=0.0, cache_modifier=".cg"
        )
        result = tl.sum(all_parts, axis=0).to(u.dtype.element_ty)
        row = (tile // S * M + flat // R).to(tl.int64)
        rank = slot * R + flat % R
        tl.store(u + row * (S * R) + rank, result, mask=row < tokens)
        tl.store(wide + row * wide_row + rank, result, mask=row < tokens)
        tl.store(counters + tile, 0)


@triton.jit
def up_backward(
    dy,
    u,
    b,
    du_parts,
    db_parts,
    wide,
    tokens,
    dy_row,
    b_row,
    wide_row,
    OUT: tl.constexpr,
    E0: tl.constexpr,
    E1: tl.constexpr,
    E2: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COPY: tl.constexpr,
):
    """Parts of du = dy (scale·B) and of dB = dyᵀ u from one reading of dy, copied to `wide` with COPY.

    A program has C outputs of one projection and ROWS tokens. `E0`, `E1`, `E2`: where the first
    three projections end. `b` is scale · B, block-diagonal. du_parts [OUT/C, N, R], db_parts [N/ROWS, OUT, R].
    """
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    first = chunk * C
    slot = (first >= E0).to(tl.int32) + (first >= E1).to(tl.int32) + (first >= E2).to(tl.int32)
    columns = first + tl.arange(0, C)
    ranks = slot * R + tl.arange(0, R)
    weight = tl.load(b + columns.to(tl.int64)[:, None] * b_row + ranks[None, :])
    acc = tl.zeros([C, R], tl.float32)
    for start in tl.range(part * ROWS, tl.minimum(part * ROWS + ROWS, tokens), M):
        rows = start + tl.arange(0, M)
        inside = rows < tokens
        g = tl.load(dy + rows.to(tl.int64)[:, None] * dy_row + columns[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(u + rows[:, None] * (S * R) + ranks[None, :], mask=inside[:, None], other=0.0)
        if COPY:
            tl.store(wide + rows.to(tl.int64)[:, None] * wide_row + columns[None, :], g, mask=inside[:, None])
        du = tl.dot(g, weight)
        place = (chunk.to(tl.int64) * tokens + rows)[:, None] * R + tl.arange(0, R)[None, :]
        tl.store(du_parts + place, du, mask=inside[:, None])
        acc = tl.dot(g.T, v, acc)
    place = (part * OUT + columns)[:, None] * R + tl.arange(0, R)[None, :]
    tl.store(db_parts + place, acc)


@triton.jit
def up_backward_sums(
    du_parts,
    db_parts,
    du,
    wide,
    db,
    da_parts,
    da,
    counters,
    scale,
    tokens,
    wide_row,
    parts,
    OUT: tl.constexpr,
    E0: tl.constexpr,
    E1: tl.constexpr,
    E2: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    DA: tl.constexpr,
    COUNTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """du[N, S·R], also into the columns past dy in its own rows, and dB[OUT, R] from their parts, in one order.

    Besides, since that comes before `down_gradient` and behind `gated_backward`: zeros for the counters of the
    one, and the sum of the DA elements of the other's parts.
    """
    tiles = tl.cdiv(tokens, M)
    program = tl.program_id(0)
    ranks = tl.arange(0, R)
    if program == 0:
        tl.store(counters + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))
    if program < tiles * S:
        slot = program % S
        rows = program // S * M + tl.arange(0, M)
        inside = rows < tokens
        begin = tl.where(slot == 0, 0, tl.where(slot == 1, E0, tl.where(slot == 2, E1, E2)))
        end = tl.minimum(tl.where(slot == 0, E0, tl.where(slot == 1, E1, tl.where(slot == 2, E2, OUT))), OUT)
        acc = tl.zeros([M, R], tl.float32)
        for chunk in tl.range(begin // C, end // C):
            place = (tl.cast(chunk, tl.int64) * tokens + rows)[:, None] * R + ranks[None, :]
            acc += tl.load(du_parts + place, mask=inside[:, None], other=0.0)
        result = acc.to(du.dtype.element_ty)
        columns = slot * R + ranks
        tl.store(du + rows[:, None] * (S * R) + columns[None, :], result, mask=inside[:, None])
        tl.store(wide + rows.to(tl.int64)[:, None] * wide_row + columns[None, :], result, mask=inside[:, None])
    elif program >= tiles * S + tl.cdiv(OUT, M):
        place = (program - tiles * S - tl.cdiv(OUT, M)) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for part in tl.range(0, parts):
            total += tl.load(da_parts + part * DA + place, mask=place < DA, other=0.0)
        tl.store(da + place, total, mask=place < DA)
    else:
        outputs = (program - tiles * S) * M + tl.arange(0, M)
        inside = outputs < OUT
        acc = tl.zeros([M, R], tl.float32)
        for part in tl.range(0, parts):
            place = (part * OUT + outputs)[:, None] * R + ranks[None, :]
            acc += tl.load(db_parts + place, mask=inside[:, None], other=0.0)
        tl.store(db + outputs[:, None] * R + ranks[None, :], acc * scale, mask=inside[:, None])


@triton.jit
def down_backward(
    x,
    du,
    parts,
    seed,
    salts,
    threshold,
    inverse,
    tokens,
    x_row,
    IN: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    DROP: tl.constexpr,
):
    """Parts of dA = duᵀ dropout(x), [N/ROWS, S·R, IN]: a program has C inputs, ROWS tokens, one projection."""
    columns = tl.program_id(0) // S * C + tl.arange(0, C)
    slot = tl.program_id(0) % S
    part = tl.program_id(1)
    ranks = slot * R + tl.arange(0, R)
    acc = tl.zeros([C, R], tl.float32)
    for start in tl.range(part * ROWS, tl.minimum(part * ROWS + ROWS, tokens), M):
        rows = start + tl.arange(0, M)
        inside = rows < tokens
        offsets = rows.to(tl.int64)[:, None] * x_row + columns[None, :]
        value = tl.load(x + offsets, mask=inside[:, None] & (columns < IN)[None, :], other=0.0)
        if DROP:
            kept = _kept(rows, columns, seed, slot, salts, threshold, IN)
            value = tl.where(kept, value.to(tl.float32) * inverse, 0.0).to(value.dtype)
        g = tl.load(du + rows[:, None] * (S * R) + ranks[None, :], mask=inside[:, None], other=0.0)
        acc = tl.dot(value.T, g, acc)
    place = (part * (S * R) + ranks)[None, :] * IN + columns[:, None]
    tl.store(parts + place, acc, mask=(columns < IN)[:, None])


@triton.jit
def dropped_dx(
    dx,
    du,
    a,
    seed,
    salts,
    threshold,
    inverse,
    tokens,
    a_row,
    IN: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
):
    """dx += Σ over projections of mask · (du A) / (1 − p), in place, a tile a program."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    inside = (rows < tokens)[:, None] & (columns < IN)[None, :]
    place = rows.to(tl.int64)[:, None] * IN + columns[None, :]
    acc = tl.load(dx + place, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(S):
        ranks = slot * R + tl.arange(0, R)
        g = tl.load(du + rows[:, None] * (S * R) + ranks[None, :], mask=(rows < tokens)[:, None], other=0.0)
        weight = tl.load(a + ranks[:, None] * a_row + columns[None, :], mask=(columns < IN)[None, :], other=0.0)
        kept = _kept(rows, columns, seed, slot, salts, threshold, IN)
        acc += tl.where(kept, tl.dot(g, weight) * inverse, 0.0)
    tl.store(dx + place, acc.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def down_gradient(
    x,
    du,
    parts,
    da,
    counters,
    tokens,
    x_row,
    IN: tl.constexpr,
    RANKS: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dA = duᵀ x, [RANKS, IN] fp32, for all projections from one reading of x; WIDE is a power of two from RANKS on.

    A program has C inputs and ROWS tokens. The last to come of those that share the inputs adds their parts, in the
    order of the tokens, whoever it is. `counters` are 0 at the start, one for each C inputs.
    """
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    columns = chunk * C + tl.arange(0, C)
    ranks = tl.arange(0, WIDE)
    acc = tl.zeros([C, WIDE], tl.float32)
    for start in tl.range(part * ROWS, tl.minimum(part * ROWS + ROWS, tokens), M):
        rows = start + tl.arange(0, M)
        inside = (rows < tokens)[:, None]
        place = rows.to(tl.int64)[:, None] * x_row + columns[None, :]
        value = tl.load(x + place, mask=inside & (columns < IN)[None, :], other=0.0)
        g = tl.load(du + rows[:, None] * RANKS + ranks[None, :], mask=inside & (ranks < RANKS)[None, :], other=0.0)
        acc = tl.dot(value.T, g, acc)
    place = ranks[None, :] * IN + columns[:, None]
    kept = (ranks < RANKS)[None, :] & (columns < IN)[:, None]
    tl.store(parts + part * (RANKS * IN) + place, acc, mask=kept)
    tl.debug_barrier()  # every thread's share is written before the program is counted
    if tl.atomic_add(counters + chunk, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
        total = tl.zeros([C, WIDE], tl.float32)
        for number in tl.range(0, tl.num_programs(1)):
            total += tl.load(parts + number * (RANKS * IN) + place, mask=kept, other=0.0, cache_modifier=".cg")
        tl.store(da + place, total, mask=kept)
