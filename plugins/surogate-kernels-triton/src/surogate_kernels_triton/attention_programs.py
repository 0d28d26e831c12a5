"""Causal attention over packed documents, forward and backward, in Triton.

The queries of a row of documents are cut into tiles of equal size wherever documents begin; a
program finds the documents of its tile in `cu_seqlens`, so the grid depends on the number of
tokens alone. A tile within one document meets masks on its diagonal only; a tile that holds a
border masks throughout. Nothing is added atomically: every output element has one program and
one order of summation. The scheme is FlashAttention-2's (arXiv 2307.08691).

Names: N tokens, H query heads, K key/value heads, E head features, M rows of a query block,
T rows of a key block, S document borders. Descriptors are of [N, heads · E], their blocks of one
head's rows. Scores are kept times log2(e), so that exp2 serves; `lse` is log2 of the sum of
exponentials, [H, N].
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1.0e30)
"""A masked score: finite, so that differences of two stay defined."""
CHUNK = tl.constexpr(64)
"""Borders compared at a time."""


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
def _forward_keys(
    acc,
    sums,
    tops,
    q,
    k_desc,
    v_desc,
    column,
    rows,
    starts,
    begin,
    end,
    factor,
    T: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One query block over the keys [begin, end): online softmax."""
    for first in tl.range(begin, end, T):
        k = k_desc.load([first, column])
        scores = tl.dot(q, k.T)
        if MASKED:
            keys = first + tl.arange(0, T)
            seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= starts[:, None])
            scores = tl.where(seen, scores * factor, HIDDEN)
            top = tl.maximum(tops, tl.max(scores, 1))
            p = tl.where(seen, tl.exp2(scores - top[:, None]), 0.0)
        else:
            top = tl.maximum(tops, tl.max(scores, 1) * factor)
            p = tl.exp2(scores * factor - top[:, None])
        shrink = tl.exp2(tops - top)
        sums = sums * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = v_desc.load([first, column])
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
    cu_seqlens,
    borders,
    tokens,
    out_row,
    factor,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
):
    """One program: one head's block of M queries. `factor` = scale · log2(e)."""
    tile = tl.num_programs(0) // H - 1 - tl.program_id(0) // H
    head = tl.program_id(0) % H
    first = tile * M
    rows = first + tl.arange(0, M)
    start = _start(cu_seqlens, borders, first)
    last_start = _start(cu_seqlens, borders, tl.minimum(first + M, tokens) - 1)
    if last_start > first:
        starts = _starts(cu_seqlens, borders, rows, M)
        masked = start
    else:
        starts = tl.zeros([M], tl.int32) + start
        masked = start + (first - start) // T * T
    q = q_desc.load([first, head * E])
    column = head // GROUP * E
    acc = tl.zeros([M, E], tl.float32)
    sums = tl.zeros([M], tl.float32)
    tops = tl.full([M], HIDDEN, tl.float32)
    acc, sums, tops = _forward_keys(
        acc, sums, tops, q, k_desc, v_desc, column, rows, starts, start, masked, factor, T, False
    )
    end = tl.minimum(first + M, tokens)
    acc, sums, tops = _forward_keys(
        acc, sums, tops, q, k_desc, v_desc, column, rows, starts, masked, end, factor, T, True
    )
    inside = rows < tokens
    tl.store(lse + head * tokens + rows, tops + tl.log2(sums), mask=inside)
    offsets = rows.to(tl.int64)[:, None] * out_row + head * E + tl.arange(0, E)[None, :]
    tl.store(out + offsets, (acc / sums[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


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
    rows,
    starts,
    begin,
    end,
    factor,
    T: tl.constexpr,
    MASKED: tl.constexpr,
):
    """dq of one query block over the keys [begin, end), without the scale."""
    for first in tl.range(begin, end, T):
        k = k_desc.load([first, column])
        v = v_desc.load([first, column])
        scores = tl.dot(q, k.T)
        dp = tl.dot(dy, v.T)
        p = tl.exp2(scores * factor - lse[:, None])
        if MASKED:
            keys = first + tl.arange(0, T)
            seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= starts[:, None])
            p = tl.where(seen, p, 0.0)
        ds = p * (dp - delta[:, None])
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
    H: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
):
    """One program: dq and delta = Σ_E out · dy of one head's block of M queries."""
    tile = tl.num_programs(0) // H - 1 - tl.program_id(0) // H
    head = tl.program_id(0) % H
    first = tile * M
    rows = first + tl.arange(0, M)
    inside = rows < tokens
    offsets = rows.to(tl.int64)[:, None] * (H * E) + head * E + tl.arange(0, E)[None, :]
    place = rows.to(tl.int64)[:, None] * out_row + head * E + tl.arange(0, E)[None, :]
    o = tl.load(out + place, mask=inside[:, None], other=0.0).to(tl.float32)
    g = tl.load(dy + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
    deltas = tl.sum(o * g, 1)
    tl.store(delta + head * tokens + rows, deltas, mask=inside)
    lses = tl.load(lse + head * tokens + rows, mask=inside, other=0.0)
    start = _start(cu_seqlens, borders, first)
    last_start = _start(cu_seqlens, borders, tl.minimum(first + M, tokens) - 1)
    if last_start > first:
        starts = _starts(cu_seqlens, borders, rows, M)
        masked = start
    else:
        starts = tl.zeros([M], tl.int32) + start
        masked = start + (first - start) // T * T
    q = q_desc.load([first, head * E])
    dy_block = dy_desc.load([first, head * E])
    column = head // GROUP * E
    acc = tl.zeros([M, E], tl.float32)
    acc = _backward_keys(
        acc, q, dy_block, lses, deltas, k_desc, v_desc, column, rows, starts, start, masked, factor, T, False
    )
    end = tl.minimum(first + M, tokens)
    acc = _backward_keys(
        acc, q, dy_block, lses, deltas, k_desc, v_desc, column, rows, starts, masked, end, factor, T, True
    )
    tl.store(dq + offsets, (acc * scale).to(dq.dtype.element_ty), mask=inside[:, None])


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
    keys,
    stops,
    begin,
    end,
    factor,
    M: tl.constexpr,
    MASKED: tl.constexpr,
):
    """dk (without the scale) and dv of one key block over one head's queries [begin, end)."""
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
        g = dy_desc.load([first, column])
        dp = tl.dot(v, g.T)
        p = tl.exp2(scores * factor - lses[None, :])
        if MASKED:
            seen = (keys[:, None] <= rows[None, :]) & (rows[None, :] < tl.minimum(stops, end)[:, None])
            p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(g.dtype), g, dv)
        ds = p * (dp - deltas[None, :])
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
    K: tl.constexpr,
    GROUP: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
):
    """One program: dk and dv of one key/value head's block of T keys, over the query heads of its group in order."""
    tile = tl.program_id(0) // K
    kv_head = tl.program_id(0) % K
    first = tile * T
    keys = first + tl.arange(0, T)
    after = tl.minimum(first + T, tokens)
    first_stop = _stop(cu_seqlens, borders, first, tokens)
    stop = _stop(cu_seqlens, borders, after - 1, tokens)
    if first_stop < after:
        stops = _stops(cu_seqlens, borders, keys, tokens, T)
        masked = stop
    else:
        stops = tl.zeros([T], tl.int32) + stop
        masked = stop - (stop - after) // M * M
    k = k_desc.load([first, kv_head * E])
    v = v_desc.load([first, kv_head * E])
    acc_k = tl.zeros([T, E], tl.float32)
    acc_v = tl.zeros([T, E], tl.float32)
    for head in tl.range(kv_head * GROUP, (kv_head + 1) * GROUP):
        base = head * tokens
        acc_k, acc_v = _backward_rows(
            acc_k,
            acc_v,
            k,
            v,
            q_desc,
            dy_desc,
            lse + base,
            delta + base,
            head * E,
            keys,
            stops,
            first,
            masked,
            factor,
            M,
            True,
        )
        acc_k, acc_v = _backward_rows(
            acc_k,
            acc_v,
            k,
            v,
            q_desc,
            dy_desc,
            lse + base,
            delta + base,
            head * E,
            keys,
            stops,
            masked,
            stop,
            factor,
            M,
            False,
        )
    inside = keys < tokens
    offsets = keys.to(tl.int64)[:, None] * (K * E) + kv_head * E + tl.arange(0, E)[None, :]
    tl.store(dk + offsets, (acc_k * scale).to(dk.dtype.element_ty), mask=inside[:, None])
    tl.store(dv + offsets, acc_v.to(dv.dtype.element_ty), mask=inside[:, None])
