"""The programs of experts in Triton: routing, rows by expert, skinny products of adapters, sums of a token's rows.

Names: E experts, EP the next power of two, K experts of a token, R rows in the order of their experts, L rank of an
adapter, S projections of one input, M, C, B rows, columns and steps of a tile. A tile has rows of one expert; `table`
has for each tile (expert or -1, first row, row past the expert's last, 0). Nothing is added atomically, and every sum
has one order.
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from surogate_native.random_programs import hash32

# --------------------------------------------------------------------------- routing


@triton.jit
def choose(
    logits,
    correction,
    weights,
    experts,
    counts,
    tokens,
    logits_row,
    scale,
    least,
    E: tl.constexpr,
    EP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    T: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """The K best experts of T tokens with their weights, and how many choices each expert gets of them. `least`: added
    to the sum that weights are divided by.
    """
    block = tl.program_id(0)
    rows = block * T + tl.arange(0, T)
    columns = tl.arange(0, EP)
    ranks = tl.arange(0, KP)
    inside = rows < tokens
    real = (columns < E)[None, :]
    place = rows.to(tl.int64)[:, None] * logits_row + columns[None, :]
    value = tl.load(logits + place, mask=inside[:, None] & real, other=0.0).to(tl.float32)
    if SIGMOID:
        share = 1.0 / (1.0 + tl.exp(-value))
    else:
        value = tl.where(real, value, float("-inf"))
        raised = tl.exp(value - tl.max(value, 1)[:, None])
        share = raised / tl.sum(raised, 1)[:, None]
    key = share
    if correction is not None:
        key += tl.load(correction + columns, mask=columns < E, other=0.0).to(tl.float32)[None, :]
    # NaN comes first, as in a sort. Under softmax one makes all shares of its row NaN.
    key = tl.where(real, tl.where(key != key, float("inf"), key), float("-inf"))
    found = tl.zeros([T, KP], tl.int32)
    picked = tl.zeros([T, KP], tl.float32)
    total = tl.zeros([T], tl.float32)
    count = tl.zeros([EP], tl.int32)
    for k in tl.range(0, K):
        best = tl.max(key, 1)
        index = tl.min(tl.where(key == best[:, None], columns[None, :], EP), 1)
        hit = columns[None, :] == index[:, None]
        weight = tl.sum(tl.where(hit, share, 0.0), 1)
        key = tl.where(hit, float("-inf"), key)
        count += tl.sum((hit & inside[:, None]).to(tl.int32), 0)
        total += weight
        here = (ranks == k)[None, :]
        found = tl.where(here, index[:, None], found)
        picked = tl.where(here, weight[:, None], picked)
    if RENORMALISE:
        picked = picked / (total + least)[:, None]
    picked = picked * scale
    target = rows[:, None] * K + ranks[None, :]
    stored = inside[:, None] & (ranks < K)[None, :]
    tl.store(weights + target, picked, mask=stored)
    tl.store(experts + target, found, mask=stored)
    tl.store(counts + block * E + columns, count, mask=columns < E)


@triton.jit
def scan(counts, bases, ends, blocks, E, EP: tl.constexpr, C: tl.constexpr, B: tl.constexpr):
    """Where the choices of each block for each expert begin in the sorted order, and where each expert's rows end."""
    first = tl.program_id(0) * C
    columns = first + tl.arange(0, C)
    every = tl.arange(0, EP)
    before = tl.zeros([EP], tl.int32)
    own = tl.zeros([C], tl.int32)
    for start in tl.range(0, blocks, B):
        rows = start + tl.arange(0, B)
        inside = (rows < blocks)[:, None]
        before += tl.sum(
            tl.load(counts + rows[:, None] * E + every[None, :], mask=inside & (every < first)[None, :], other=0), 0
        )
        own += tl.sum(
            tl.load(counts + rows[:, None] * E + columns[None, :], mask=inside & (columns < E)[None, :], other=0), 0
        )
    stop = tl.sum(before, 0) + tl.cumsum(own, 0)
    tl.store(ends + columns, stop, mask=columns < E)
    running = stop - own
    for start in tl.range(0, blocks, B):
        rows = start + tl.arange(0, B)
        mask = (rows < blocks)[:, None] & (columns < E)[None, :]
        place = rows[:, None] * E + columns[None, :]
        count = tl.load(counts + place, mask=mask, other=0)
        tl.store(bases + place, running[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        running += tl.sum(count, 0)


@triton.jit
def scatter(experts, bases, order, slot, total, E, CHOICES: tl.constexpr, M: tl.constexpr, C: tl.constexpr):
    """The place of each of a block's choices among the sorted rows, and the inverse."""
    block = tl.program_id(0)
    number = tl.arange(0, M)
    places = block * CHOICES + number
    inside = (number < CHOICES) & (places < total)
    mine = tl.load(experts + places, mask=inside, other=-1)
    rank = tl.zeros([M], tl.int32)
    for start in tl.range(0, M, C):
        others = start + tl.arange(0, C)
        before = block * CHOICES + others
        other = tl.load(experts + before, mask=(others < CHOICES) & (before < total), other=-2)
        same = (mine[:, None] == other[None, :]) & (others[None, :] < number[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    position = tl.load(bases + block * E + mine, mask=inside, other=0) + rank
    tl.store(slot + places, position, mask=inside)
    tl.store(order + position, places, mask=inside)


@triton.jit
def tile_table(ends, table, tiles, E, EP: tl.constexpr, M: tl.constexpr, B: tl.constexpr):
    """The tiles of M rows, expert after expert; the last tile of an expert may have fewer."""
    numbers = tl.program_id(0) * B + tl.arange(0, B)
    experts = tl.arange(0, EP)
    real = experts < E
    stop = tl.load(ends + experts, mask=real, other=0)
    begin = tl.load(ends + experts - 1, mask=real & (experts > 0), other=0)
    count = tl.where(real, (stop - begin + M - 1) // M, 0)
    last = tl.cumsum(count, 0)
    expert = tl.sum((last[None, :] <= numbers[:, None]).to(tl.int32), 1)
    hit = experts[None, :] == expert[:, None]
    step = numbers[:, None] - (last - count)[None, :]
    first = tl.sum(tl.where(hit, begin[None, :] + step * M, 0), 1)
    limit = tl.sum(tl.where(hit, stop[None, :], 0), 1)
    inside = numbers < tiles
    tl.store(table + numbers * 4, tl.where(expert < E, expert, -1), mask=inside)
    tl.store(table + numbers * 4 + 1, first, mask=inside)
    tl.store(table + numbers * 4 + 2, limit, mask=inside)
    tl.store(table + numbers * 4 + 3, 0, mask=inside)


# --------------------------------------------------------------------------- sums over a token's rows


@triton.jit
def sum_rows(y, slot, weights, out, y_row, K: tl.constexpr, OUT: tl.constexpr, C: tl.constexpr, WEIGHTED: tl.constexpr):
    """A token's K rows, times their weights with WEIGHTED, added in the order of its choices; `slot` is -1 of a choice
    without a row.
    """
    token = tl.program_id(0)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    inside = columns < OUT
    acc = tl.zeros([C], tl.float32)
    for k in tl.range(0, K):
        row = tl.load(slot + token * K + k).to(tl.int64)
        here = row >= 0
        value = tl.load(y + row * y_row + columns, mask=inside & here, other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weights + token * K + k, mask=here, other=0.0)
        acc += value
    tl.store(out + token.to(tl.int64) * OUT + columns, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_backward(
    dout,
    y,
    order,
    slot,
    weights,
    dy,
    dweights,
    last,
    rows,
    dout_row,
    y_row,
    K: tl.constexpr,
    OUT: tl.constexpr,
    C: tl.constexpr,
    SORTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of `dout` times their weights, and the gradients of the weights. `last`: None, or where the rows end
    that are read.

    Row r of `dout` is that of its token, or with SORTED the row itself. A choice may have several rows, of which `slot`
    names the one that its weight multiplies, or none.
    """
    first = tl.program_id(0) * ROWS
    count = tl.minimum(ROWS, rows - first)
    if last is not None:
        count = tl.minimum(count, tl.load(last) - first)
    for number in tl.range(0, count):
        row = first.to(tl.int64) + number
        choice = tl.load(order + row)
        source = row if SORTED else (choice // K).to(tl.int64)
        weight = tl.load(weights + choice)
        acc = tl.zeros([C], tl.float32)
        for start in tl.range(0, OUT, C):
            columns = start + tl.arange(0, C)
            inside = columns < OUT
            g = tl.load(dout + source * dout_row + columns, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(y + row * y_row + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(dy + row * OUT + columns, (g * weight).to(dy.dtype.element_ty), mask=inside)
            acc += g * v
        tl.store(dweights + choice, tl.sum(acc, 0), mask=tl.load(slot + choice) == row)


# --------------------------------------------------------------------------- adapters


@triton.jit
def kept(rows, columns, seed, key, threshold, IN: tl.constexpr):
    """`ops.dropout_mask` of a tile of the sorted rows [R, IN]; `key`: a projection's part of the random key."""
    counter = rows.to(tl.int32)[:, None] * IN + columns[None, :]
    return hash32(counter ^ hash32(tl.load(seed) + key)) >= threshold


@triton.jit
def down(
    x,
    order,
    table,
    a0,
    a1,
    u,
    seed,
    key0,
    key1,
    threshold,
    inverse,
    scale,
    x_row,
    u_row,
    IN: tl.constexpr,
    A_L: tl.constexpr,
    A_I: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    DROP: tl.constexpr,
):
    """u[r, s·L + l] = scale · Σ_i x[r, i] A_s[e, l, i]; with K, row r of x is that of its token.

    With DROP, elements of x are dropped.

    `A_L`, `A_I`: strides of A, so that B is read as an A too.
    """
    tile = tl.program_id(0)
    expert = tl.load(table + tile * 4)
    if expert < 0:
        return
    rows = tl.load(table + tile * 4 + 1) + tl.arange(0, M)
    inside = rows < tl.load(table + tile * 4 + 2)
    source = rows
    if K > 0:
        source = tl.load(order + rows, mask=inside, other=0) // K
    source = source.to(tl.int64)
    ranks = tl.arange(0, L)
    base = expert.to(tl.int64) * (IN * L)
    first = tl.zeros([M, L], tl.float32)
    second = tl.zeros([M, L], tl.float32)
    for start in tl.range(0, IN, C):
        columns = start + tl.arange(0, C)
        value = tl.load(
            x + source[:, None] * x_row + columns[None, :], mask=inside[:, None] & (columns < IN)[None, :], other=0.0
        )
        place = base + columns[:, None] * A_I + ranks[None, :] * A_L
        mine = value
        if DROP:
            stays = kept(rows, columns, seed, key0, threshold, IN)
            mine = tl.where(stays, value.to(tl.float32) * inverse, 0.0).to(value.dtype)
        first = tl.dot(mine, tl.load(a0 + place, mask=(columns < IN)[:, None], other=0.0), first)
        if S > 1:
            mine = value
            if DROP:
                stays = kept(rows, columns, seed, key1, threshold, IN)
                mine = tl.where(stays, value.to(tl.float32) * inverse, 0.0).to(value.dtype)
            second = tl.dot(mine, tl.load(a1 + place, mask=(columns < IN)[:, None], other=0.0), second)
    target = rows.to(tl.int64)[:, None] * u_row + ranks[None, :]
    tl.store(u + target, (first * scale).to(u.dtype.element_ty), mask=inside[:, None])
    if S > 1:
        tl.store(u + target + L, (second * scale).to(u.dtype.element_ty), mask=inside[:, None])


@triton.jit
def up(
    y,
    out,
    u,
    b0,
    b1,
    table,
    seed,
    key0,
    key1,
    threshold,
    inverse,
    scale,
    y_row,
    out_row,
    u_row,
    OUT: tl.constexpr,
    B_L: tl.constexpr,
    B_O: tl.constexpr,
    L: tl.constexpr,
    S: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    DROP: tl.constexpr,
):
    """out[r, o] = y[r, o] + scale · Σ_s Σ_l u[r, s·L + l] B_s[e, o, l]; `B_L`, `B_O`: strides of B.

    With DROP, elements of each product are dropped.
    """
    tile = tl.program_id(0)
    expert = tl.load(table + tile * 4)
    if expert < 0:
        return
    rows = tl.load(table + tile * 4 + 1) + tl.arange(0, M)
    inside = (rows < tl.load(table + tile * 4 + 2))[:, None]
    columns = tl.program_id(1) * C + tl.arange(0, C)
    real = (columns < OUT)[None, :]
    ranks = tl.arange(0, L)
    rows = rows.to(tl.int64)
    place = expert.to(tl.int64) * (OUT * L) + ranks[:, None] * B_L + columns[None, :] * B_O
    v = tl.load(u + rows[:, None] * u_row + ranks[None, :], mask=inside, other=0.0)
    acc = tl.dot(v, tl.load(b0 + place, mask=real, other=0.0))
    if DROP:
        acc = tl.where(kept(rows, columns, seed, key0, threshold, OUT), acc * inverse, 0.0)
    if S > 1:
        v = tl.load(u + rows[:, None] * u_row + L + ranks[None, :], mask=inside, other=0.0)
        if DROP:
            more = tl.dot(v, tl.load(b1 + place, mask=real, other=0.0))
            acc += tl.where(kept(rows, columns, seed, key1, threshold, OUT), more * inverse, 0.0)
        else:
            acc = tl.dot(v, tl.load(b1 + place, mask=real, other=0.0), acc)
    value = tl.load(y + rows[:, None] * y_row + columns[None, :], mask=inside & real, other=0.0)
    acc = acc * scale + value.to(tl.float32)
    target = out + rows[:, None] * out_row + columns[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside & real)


@triton.jit
def factors(
    left,
    right,
    order,
    ends,
    out,
    seed,
    key0,
    threshold,
    inverse,
    scale,
    left_row,
    right_row,
    E,
    OUT: tl.constexpr,
    OUT_O: tl.constexpr,
    OUT_L: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    RANKS: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    DROP: tl.constexpr,
):
    """out[w // L, e, o, w % L] = scale · Σ_r left[r, o] right[r, w] over an expert's rows, in their order.

    With K, row r of `left` is that of its token. With DROP, elements of `left` are dropped. `OUT_O`,
    `OUT_L`: strides of out. RANKS = S·L, of which WIDE is the next power of two.
    """
    columns = tl.program_id(0) * C + tl.arange(0, C)
    expert = tl.program_id(1)
    wide = tl.arange(0, WIDE)
    real = (columns < OUT)[None, :]
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    acc = tl.zeros([C, WIDE], tl.float32)
    for start in tl.range(begin, stop, M):
        rows = start + tl.arange(0, M)
        inside = (rows < stop)[:, None]
        source = rows
        if K > 0:
            source = tl.load(order + rows, mask=rows < stop, other=0) // K
        g = tl.load(left + source.to(tl.int64)[:, None] * left_row + columns[None, :], mask=inside & real, other=0.0)
        if DROP:
            g = tl.where(kept(rows, columns, seed, key0, threshold, OUT), g.to(tl.float32) * inverse, 0.0).to(g.dtype)
        v = tl.load(
            right + rows.to(tl.int64)[:, None] * right_row + wide[None, :],
            mask=inside & (wide < RANKS)[None, :],
            other=0.0,
        )
        acc = tl.dot(tl.trans(g), v, acc)
    place = ((wide // L).to(tl.int64) * E + expert)[None, :] * (OUT * L) + (wide % L)[None, :] * OUT_L
    stored = (columns < OUT)[:, None] & (wide < RANKS)[None, :]
    tl.store(out + place + columns[:, None] * OUT_O, acc * scale, mask=stored)
