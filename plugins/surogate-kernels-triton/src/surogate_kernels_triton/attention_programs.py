"""Causal attention over packed documents, forward and backward, in Triton.

The queries of a row of documents are cut into tiles of equal size wherever documents begin; a
program finds the documents of its tile in `cu_seqlens`, so the grid depends on the number of
tokens alone. A tile within one document meets masks on its diagonal only; a tile that holds a
border masks throughout. Nothing is added atomically: every output element has one program and
one order of summation. The scheme is FlashAttention-2's (arXiv 2307.08691).

With a window the loops begin and end where it does: tiles that nothing of it reaches are not read,
and only those on its edges are masked. That is one loop with a branch, where plain attention has
a loop with masks and one without: the copies of every loop begin anew.

Names: N tokens, H query heads, K key/value heads, E features of a query and a key, F of a value, EP and FP their next
powers of two, M rows of a query block, T rows of a key block, S document borders, W the window and WINDOWED whether
there is one, C the soft cap (0: none). Descriptors are of [N, heads · E], their blocks of one head's rows. Where EP is
more than E, these have columns of the next head too; they are zeros in the block that a program keeps. Scores are kept
times log2(e), so that exp2 serves; `lse` is log2 of the sum of exponentials, the sink's among them, [H, N].
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1.0e30)
"""A masked score: finite, so that differences of two stay defined."""
LOWEST = tl.constexpr(-1.0e20)
"""Less than every score that is not masked."""
SOME = tl.constexpr(2)
"""Tiles are masked if they are on an edge."""
CHUNK = tl.constexpr(64)
"""Borders compared at a time."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _start(cu_seqlens, count, token):
    """Where the document of a token begins: the last border at or before it."""
    best = 0
    for first in range(0, count, CHUNK):
        number = first + tl.arange(0, CHUNK)
        border = tl.load(cu_seqlens + number, mask=number < count, other=0)
        best = tl.maximum(best, tl.max(tl.where(border <= token, border, 0)))
    return best


@triton.jit
def _starts(cu_seqlens, count, tokens, ROWS: tl.constexpr):
    """`_start` of every token of a block."""
    best = tl.zeros([ROWS], tl.int32)
    for first in range(0, count, CHUNK):
        number = first + tl.arange(0, CHUNK)
        border = tl.load(cu_seqlens + number, mask=number < count, other=0)
        best = tl.maximum(best, tl.max(tl.where(border[None, :] <= tokens[:, None], border[None, :], 0), axis=1))
    return best


@triton.jit
def _stop(cu_seqlens, count, token, tokens):
    """Where the document of a token ends: the first border after it; `tokens` where there is none."""
    best = tokens
    for first in range(0, count, CHUNK):
        number = first + tl.arange(0, CHUNK)
        border = tl.load(cu_seqlens + number, mask=number < count, other=tokens)
        best = tl.minimum(best, tl.min(tl.where(border > token, border, tokens)))
    return best


@triton.jit
def _stops(cu_seqlens, count, token, tokens, ROWS: tl.constexpr):
    """`_stop` of every token of a block."""
    best = tl.full([ROWS], 0, tl.int32) + tokens
    for first in range(0, count, CHUNK):
        number = first + tl.arange(0, CHUNK)
        border = tl.load(cu_seqlens + number, mask=number < count, other=tokens)
        best = tl.minimum(best, tl.min(tl.where(border[None, :] > token[:, None], border[None, :], tokens), axis=1))
    return best


@triton.jit
def _tanh(x):
    """tanh(x / (2 log2 e))."""
    return 1.0 - 2.0 / (tl.exp2(x) + 1.0)


@triton.jit
def _masked(x, E: tl.constexpr, EP: tl.constexpr):
    """A block whose columns behind the first E are zeros."""
    if EP != E:
        x = tl.where((tl.arange(0, EP) < E)[None, :], x, 0.0)
    return x


@triton.jit
def _keys_seen(cu_seqlens, borders, tokens, first, W, M: tl.constexpr, T: tl.constexpr, WINDOWED: tl.constexpr):
    """(begin, whole, diagonal, starts): a block of queries sees keys from `begin`, all of those in [whole, diagonal),
    and each row those from its start.
    """
    rows = first + tl.arange(0, M)
    start = _start(cu_seqlens, borders, first)
    last_start = _start(cu_seqlens, borders, tl.minimum(first + M, tokens) - 1)
    begin = start
    if WINDOWED:
        # Whole tiles before the diagonal, so that this one is masked once.
        begin = tl.maximum(start, first - (W + T - 2) // T * T)
    whole = begin
    if last_start > first:
        starts = _starts(cu_seqlens, borders, rows, M)
        diagonal = begin
    else:
        starts = tl.zeros([M], tl.int32) + start
        diagonal = begin + (first - begin) // T * T
        if WINDOWED:
            edge = tl.maximum(first + M - W - begin, 0)
            whole = tl.minimum(begin + (edge + T - 1) // T * T, diagonal)
    if WINDOWED:
        starts = tl.maximum(starts, rows - (W - 1))
    return begin, whole, diagonal, starts


@triton.jit
def _forward_keys(
    acc,
    sums,
    tops,
    q,
    k_desc,
    v_desc,
    column,
    v_column,
    rows,
    starts,
    begin,
    end,
    whole,
    diagonal,
    factor,
    T: tl.constexpr,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One query block over the keys [begin, end), masked or not, or outside of [whole, diagonal): online softmax."""
    for first in tl.range(begin, end, T):
        k = k_desc.load([first, column])
        scores = tl.dot(q, k.T)
        if C > 0:
            scores = _tanh(scores * (factor * (2.0 / C))) * (C * LOG2E)
        if MASKED == SOME:
            if C == 0:
                scores = scores * factor
            if (first < whole) | (first >= diagonal):
                keys = first + tl.arange(0, T)
                seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= starts[:, None])
                scores = tl.where(seen, scores, HIDDEN)
            top = tl.maximum(tops, tl.max(scores, 1))
            p = tl.exp2(scores - top[:, None])
        elif MASKED:
            keys = first + tl.arange(0, T)
            seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= starts[:, None])
            if C > 0:
                scores = tl.where(seen, scores, HIDDEN)
            else:
                scores = tl.where(seen, scores * factor, HIDDEN)
            top = tl.maximum(tops, tl.max(scores, 1))
            p = tl.where(seen, tl.exp2(scores - top[:, None]), 0.0)
        elif C > 0:
            top = tl.maximum(tops, tl.max(scores, 1))
            p = tl.exp2(scores - top[:, None])
        else:
            top = tl.maximum(tops, tl.max(scores, 1) * factor)
            p = tl.exp2(scores * factor - top[:, None])
        shrink = tl.exp2(tops - top)
        sums = sums * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = v_desc.load([first, v_column])
        acc = tl.dot(p.to(v.dtype), v, acc)
        tops = top
    return acc, sums, tops


@triton.jit
def attention_forward(
    q_desc,
    k_desc,
    v_desc,
    out,
    lse,
    sinks,
    cu_seqlens,
    borders,
    tokens,
    out_row,
    factor,
    W,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    WINDOWED: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
):
    """One program: one head's block of M queries. `factor` = scale · log2(e); `sinks` [H] or None."""
    tile = tl.num_programs(0) // H - 1 - tl.program_id(0) // H
    head = tl.program_id(0) % H
    first = tile * M
    rows = first + tl.arange(0, M)
    begin, whole, diagonal, starts = _keys_seen(cu_seqlens, borders, tokens, first, W, M, T, WINDOWED)
    q = _masked(q_desc.load([first, head * E]), E, EP)
    column, v_column = head // GROUP * E, head // GROUP * F
    acc = tl.zeros([M, FP], tl.float32)
    if sinks is None:
        sums = tl.zeros([M], tl.float32)
        tops = tl.full([M], LOWEST if WINDOWED else HIDDEN, tl.float32)
    else:
        sums = tl.full([M], 1.0, tl.float32)
        tops = tl.zeros([M], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
    end = tl.minimum(first + M, tokens)
    if WINDOWED:
        acc, sums, tops = _forward_keys(
            acc, sums, tops, q, k_desc, v_desc, column, v_column, rows, starts, begin, end, whole, diagonal, factor,
            T, C, SOME,
        )  # fmt: skip
    else:
        acc, sums, tops = _forward_keys(
            acc, sums, tops, q, k_desc, v_desc, column, v_column, rows, starts, begin, diagonal, whole, diagonal,
            factor, T, C, False,
        )  # fmt: skip
        acc, sums, tops = _forward_keys(
            acc, sums, tops, q, k_desc, v_desc, column, v_column, rows, starts, diagonal, end, whole, diagonal,
            factor, T, C, True,
        )  # fmt: skip
    inside = rows < tokens
    tl.store(lse + head * tokens + rows, tops + tl.log2(sums), mask=inside)
    columns = tl.arange(0, FP)
    offsets = rows.to(tl.int64)[:, None] * out_row + head * F + columns[None, :]
    stored = inside[:, None]
    if FP != F:
        stored = stored & (columns < F)[None, :]
    tl.store(out + offsets, (acc / sums[:, None]).to(out.dtype.element_ty), mask=stored)


@triton.jit
def _backward_keys(
    dq,
    q,
    dy,
    lse,
    delta,
    k_desc,
    v_desc,
    column,
    v_column,
    rows,
    starts,
    begin,
    end,
    whole,
    diagonal,
    factor,
    T: tl.constexpr,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    """dq of one query block over the keys [begin, end), masked as in `_forward_keys`, without the scale."""
    for first in tl.range(begin, end, T):
        k = k_desc.load([first, column])
        v = v_desc.load([first, v_column])
        scores = tl.dot(q, k.T)
        dp = tl.dot(dy, v.T)
        if C > 0:
            bent = _tanh(scores * (factor * (2.0 / C)))
            p = tl.exp2(bent * (C * LOG2E) - lse[:, None])
        else:
            p = tl.exp2(scores * factor - lse[:, None])
        if MASKED == SOME:
            if (first < whole) | (first >= diagonal):
                keys = first + tl.arange(0, T)
                seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= starts[:, None])
                p = tl.where(seen, p, 0.0)
        elif MASKED:
            keys = first + tl.arange(0, T)
            seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= starts[:, None])
            p = tl.where(seen, p, 0.0)
        ds = p * (dp - delta[:, None])
        if C > 0:
            ds = ds * (1.0 - bent * bent)
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def attention_backward_queries(
    q_desc,
    k_desc,
    v_desc,
    dy_desc,
    out,
    dy,
    lse,
    delta,
    dq,
    cu_seqlens,
    borders,
    tokens,
    out_row,
    scale,
    factor,
    W,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    WINDOWED: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
):
    """One program: dq and delta = Σ_F out · dy of one head's block of M queries."""
    tile = tl.num_programs(0) // H - 1 - tl.program_id(0) // H
    head = tl.program_id(0) % H
    first = tile * M
    rows = first + tl.arange(0, M)
    inside = rows < tokens
    columns = tl.arange(0, FP)
    read = inside[:, None]
    if FP != F:
        read = read & (columns < F)[None, :]
    offsets = rows.to(tl.int64)[:, None] * (H * F) + head * F + columns[None, :]
    place = rows.to(tl.int64)[:, None] * out_row + head * F + columns[None, :]
    o = tl.load(out + place, mask=read, other=0.0).to(tl.float32)
    g = tl.load(dy + offsets, mask=read, other=0.0).to(tl.float32)
    deltas = tl.sum(o * g, 1)
    tl.store(delta + head * tokens + rows, deltas, mask=inside)
    lses = tl.load(lse + head * tokens + rows, mask=inside, other=0.0)
    begin, whole, diagonal, starts = _keys_seen(cu_seqlens, borders, tokens, first, W, M, T, WINDOWED)
    q = _masked(q_desc.load([first, head * E]), E, EP)
    dy_block = _masked(dy_desc.load([first, head * F]), F, FP)
    column, v_column = head // GROUP * E, head // GROUP * F
    acc = tl.zeros([M, EP], tl.float32)
    end = tl.minimum(first + M, tokens)
    if WINDOWED:
        acc = _backward_keys(
            acc, q, dy_block, lses, deltas, k_desc, v_desc, column, v_column, rows, starts, begin, end, whole, diagonal,
            factor, T, C, SOME,
        )  # fmt: skip
    else:
        acc = _backward_keys(
            acc, q, dy_block, lses, deltas, k_desc, v_desc, column, v_column, rows, starts, begin, diagonal, whole,
            diagonal, factor, T, C, False,
        )  # fmt: skip
        acc = _backward_keys(
            acc, q, dy_block, lses, deltas, k_desc, v_desc, column, v_column, rows, starts, diagonal, end, whole,
            diagonal, factor, T, C, True,
        )  # fmt: skip
    columns = tl.arange(0, EP)
    offsets = rows.to(tl.int64)[:, None] * (H * E) + head * E + columns[None, :]
    stored = inside[:, None]
    if EP != E:
        stored = stored & (columns < E)[None, :]
    tl.store(dq + offsets, (acc * scale).to(dq.dtype.element_ty), mask=stored)


@triton.jit
def _rows_seeing(cu_seqlens, borders, tokens, first, W, M: tl.constexpr, T: tl.constexpr, WINDOWED: tl.constexpr):
    """(whole, edge, end, stops): a block of keys is seen by rows from `first` to `end`, all of it by those in
    [whole, edge), and each key by those up to its stop.
    """
    keys = first + tl.arange(0, T)
    after = tl.minimum(first + T, tokens)
    first_stop = _stop(cu_seqlens, borders, first, tokens)
    stop = _stop(cu_seqlens, borders, after - 1, tokens)
    end = stop
    if WINDOWED:
        end = tl.minimum(stop, after + (W - 1))
    if first_stop < after:
        stops = _stops(cu_seqlens, borders, keys, tokens, T)
        whole = end
        edge = end
    else:
        stops = tl.zeros([T], tl.int32) + stop
        if WINDOWED:
            whole = tl.minimum(first + (T + M - 1) // M * M, end)
            edge = whole + tl.maximum(tl.minimum(stop, first + W) - whole, 0) // M * M
        else:
            whole = stop - (stop - after) // M * M
            edge = stop
    if WINDOWED:
        stops = tl.minimum(stops, keys + W)
    return whole, edge, end, stops


@triton.jit
def _backward_rows(
    dk,
    dv,
    k,
    v,
    q_desc,
    dy_desc,
    lse,
    delta,
    column,
    dy_column,
    keys,
    stops,
    begin,
    end,
    whole,
    edge,
    factor,
    M: tl.constexpr,
    C: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """dk (without the scale) and dv of one key block over one head's queries [begin, end), masked or not, or outside of
    [whole, edge).
    """
    for first in tl.range(begin, end, M):
        rows = first + tl.arange(0, M)
        q = q_desc.load([first, column])
        scores = tl.dot(k, q.T)
        if MASKED:
            lses = tl.load(lse + rows, mask=rows < end, other=0.0)
            deltas = tl.load(delta + rows, mask=rows < end, other=0.0)
        else:
            lses = tl.load(lse + rows)
            deltas = tl.load(delta + rows)
        g = dy_desc.load([first, dy_column])
        if DK:
            dp = tl.dot(v, g.T)
        if C > 0:
            bent = _tanh(scores * (factor * (2.0 / C)))
            p = tl.exp2(bent * (C * LOG2E) - lses[None, :])
        else:
            p = tl.exp2(scores * factor - lses[None, :])
        if MASKED == SOME:
            if (first < whole) | (first >= edge):
                seen = (keys[:, None] <= rows[None, :]) & (rows[None, :] < tl.minimum(stops, end)[:, None])
                p = tl.where(seen, p, 0.0)
        elif MASKED:
            seen = (keys[:, None] <= rows[None, :]) & (rows[None, :] < tl.minimum(stops, end)[:, None])
            p = tl.where(seen, p, 0.0)
        if DV:
            dv = tl.dot(p.to(g.dtype), g, dv)
        if DK:
            ds = p * (dp - deltas[None, :])
            if C > 0:
                ds = ds * (1.0 - bent * bent)
            dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def attention_backward_keys(
    q_desc,
    k_desc,
    v_desc,
    dy_desc,
    lse,
    delta,
    dk,
    dv,
    cu_seqlens,
    borders,
    tokens,
    scale,
    factor,
    W,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    WINDOWED: tl.constexpr,
    C: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
):
    """One program: dk and dv, or one of them, of one key/value head's block of T keys; query heads follow in order."""
    tile = tl.program_id(0) // K
    kv_head = tl.program_id(0) % K
    first = tile * T
    keys = first + tl.arange(0, T)
    whole, edge, end, stops = _rows_seeing(cu_seqlens, borders, tokens, first, W, M, T, WINDOWED)
    k = _masked(k_desc.load([first, kv_head * E]), E, EP)
    v = _masked(v_desc.load([first, kv_head * F]), F, FP)
    acc_k = tl.zeros([T, EP], tl.float32)
    acc_v = tl.zeros([T, FP], tl.float32)
    for head in tl.range(kv_head * GROUP, (kv_head + 1) * GROUP):
        base = head * tokens
        if WINDOWED:
            acc_k, acc_v = _backward_rows(
                acc_k, acc_v, k, v, q_desc, dy_desc, lse + base, delta + base, head * E, head * F, keys, stops, first,
                end, whole, edge, factor, M, C, DK, DV, SOME,
            )  # fmt: skip
        else:
            acc_k, acc_v = _backward_rows(
                acc_k, acc_v, k, v, q_desc, dy_desc, lse + base, delta + base, head * E, head * F, keys, stops, first,
                whole, whole, edge, factor, M, C, DK, DV, True,
            )  # fmt: skip
            acc_k, acc_v = _backward_rows(
                acc_k, acc_v, k, v, q_desc, dy_desc, lse + base, delta + base, head * E, head * F, keys, stops, whole,
                edge, whole, edge, factor, M, C, DK, DV, False,
            )  # fmt: skip
    inside = (keys < tokens)[:, None]
    if DK:
        columns = tl.arange(0, EP)
        offsets = keys.to(tl.int64)[:, None] * (K * E) + kv_head * E + columns[None, :]
        stored = inside
        if EP != E:
            stored = stored & (columns < E)[None, :]
        tl.store(dk + offsets, (acc_k * scale).to(dk.dtype.element_ty), mask=stored)
    if DV:
        columns = tl.arange(0, FP)
        offsets = keys.to(tl.int64)[:, None] * (K * F) + kv_head * F + columns[None, :]
        stored = inside
        if FP != F:
            stored = stored & (columns < F)[None, :]
        tl.store(dv + offsets, acc_v.to(dv.dtype.element_ty), mask=stored)


@triton.jit
def attention_backward_sinks(sinks, lse, delta, dsinks, tokens, R: tl.constexpr):
    """One program: a head's sink, whose weight in a row has the gradient -delta; R rows at a time, in order."""
    head = tl.program_id(0)
    sink = tl.load(sinks + head).to(tl.float32) * LOG2E
    sums = tl.zeros([R], tl.float32)
    for first in tl.range(0, tokens, R):
        rows = first + tl.arange(0, R)
        lses = tl.load(lse + head * tokens + rows, mask=rows < tokens, other=0.0)
        deltas = tl.load(delta + head * tokens + rows, mask=rows < tokens, other=0.0)
        sums += tl.where(rows < tokens, tl.exp2(sink - lses) * deltas, 0.0)
    tl.store(dsinks + head, (-tl.sum(sums)).to(dsinks.dtype.element_ty))
