"""Attention of one query a row over a cache of slots, in Triton.

A row's own position comes first, then the earlier ones in chunks of C, each a softmax of its own, which are added from
the first to the last. The operations follow each other in the same order if one program has all chunks of a row and if
each has one, so a row's bits depend on its query, on what its slot holds and on its position only. That needs a launch
without fused multiply-adds (`enable_fp_fusion`), which the compiler may choose otherwise in either form.

With a window W a slot is a ring, and chunks are counted from the first position that the row sees. A sink is part of
the softmax over the row's own position.

Names: N rows, H query heads, K key heads, M = H/K query heads of a key head, E features of a query, F of a value; MP,
EP and FP with padding; T positions at a time; CAP the soft cap (0: none).
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _folded(top, total, acc, top2, total2, acc2):
    """The softmax over two sets of positions from those over each: (largest score, sum, weighted values)."""
    new = tl.maximum(top, top2)
    first, second = tl.exp2(top - new), tl.exp2(top2 - new)
    return new, total * first + total2 * second, acc * first[:, None] + acc2 * second[:, None]


@triton.jit
def _capped(scores, CAP: tl.constexpr):
    """Scores times log2 e after the soft cap."""
    if CAP > 0:
        scores = (1.0 - 2.0 / (tl.exp2(scores * (2.0 / CAP)) + 1.0)) * (CAP * LOG2E)
    return scores


@triton.jit
def _own(query, key, value, scale, CAP: tl.constexpr):
    """The softmax over the row's own position alone."""
    top = _capped(tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale, CAP)
    acc = tl.zeros_like(top)[:, None] + value.to(tl.float32)[None, :]
    return top, tl.full(top.shape, 1.0, tl.float32), acc


@triton.jit
def _with_sink(top, total, acc, sink):
    """The same with one more score, which carries no value."""
    sink = sink.to(tl.float32) * LOG2E
    new = tl.maximum(top, sink)
    factor = tl.exp2(top - new)
    return new, total * factor + tl.exp2(sink - new), acc * factor[:, None]


@triton.jit
def _extended(top, total, acc, query, key, value, inside, scale, CAP: tl.constexpr, IEEE: tl.constexpr):
    """The softmax over a chunk so far and over the next positions."""
    if IEEE:
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    else:
        scores = tl.dot(query, tl.trans(key)) * scale
    scores = tl.where(inside[None, :], _capped(scores, CAP), float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    factor = tl.exp2(top - new)
    if IEEE:
        acc = tl.dot(weights, value, acc * factor[:, None], input_precision="ieee")
    else:
        acc = tl.dot(weights.to(value.dtype), value, acc * factor[:, None])
    return new, total * factor + tl.sum(weights, 1), acc


@triton.jit
def slot_attention(
    q, k, v, keys, values, slots, positions, sinks, out, stats, partial,
    q_row, q_head, k_row, k_head, v_row, v_head,
    key_slot, key_position, key_head, value_slot, value_position, value_head, last, chunks, scale, ring, W,
    K: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, F: tl.constexpr,
    FP: tl.constexpr, WINDOWED: tl.constexpr, CAP: tl.constexpr, C: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """A program has a key head of a row, with all its chunks or, with SPLIT, one of `chunks`.

    out: [N, H, F]; with SPLIT instead, for each chunk, stats [N, K, chunks, 2, M] and partial [N, K, chunks, M, F],
    of which the first has the row's own position too. The first program writes the row's key and value into the cache,
    where none reads them. `scale`: times log2 e. `ring`: positions of a slot. `sinks`: [H] or None. Rows of the slot
    `last` do not count.
    """
    program = tl.program_id(0)
    part = program % chunks if SPLIT else 0
    row, kv_head = (program // chunks // K).to(tl.int64), program // chunks % K
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row).to(tl.int32)
    features, columns, heads = tl.arange(0, EP), tl.arange(0, FP), tl.arange(0, MP)
    wide, real = features < E, heads < M
    place = (row * K + kv_head) * M + heads
    stored = real[:, None] & (columns < F)[None, :]
    if slot == last:
        if not SPLIT:
            tl.store(out + place[:, None] * F + columns[None, :], tl.zeros([MP, FP], tl.float32), mask=stored)
        return
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(position - (W - 1), 0)
    begin = lowest + part * C
    if begin >= tl.maximum(position, lowest + 1):
        return
    q += row * q_row + (kv_head * M + heads)[:, None] * q_head + features[None, :]
    query = tl.load(q, mask=real[:, None] & wide[None, :], other=0.0)
    keys += slot * key_slot + kv_head * key_head
    values += slot * value_slot + kv_head * value_head
    top = tl.full([MP], float("-inf"), tl.float32)
    total = tl.zeros([MP], tl.float32)
    acc = tl.zeros([MP, FP], tl.float32)
    if part == 0:
        key = tl.load(k + row * k_row + kv_head * k_head + features, mask=wide, other=0.0)
        value = tl.load(v + row * v_row + kv_head * v_head + columns, mask=columns < F, other=0.0)
        top, total, acc = _own(query, key, value, scale, CAP)
        if sinks is not None:
            sink = tl.load(sinks + kv_head * M + heads, mask=real, other=0.0)
            top, total, acc = _with_sink(top, total, acc, sink)
        at_own = position % ring if WINDOWED else position
        tl.store(keys + at_own.to(tl.int64) * key_position + features, key, mask=wide)
        tl.store(values + at_own.to(tl.int64) * value_position + columns, value, mask=columns < F)
    end = tl.minimum(position, begin + C) if SPLIT else position
    top2 = tl.full([MP], float("-inf"), tl.float32)
    total2 = tl.zeros([MP], tl.float32)
    acc2 = tl.zeros([MP, FP], tl.float32)
    for first in tl.range(begin, end, T, num_stages=STAGES):
        if not SPLIT:
            # A selection instead of a branch, so that loads of the next chunk may begin in this one.
            begins = (first - lowest) % C == 0 if WINDOWED else first % C == 0
            top3, total3, acc3 = _folded(top, total, acc, top2, total2, acc2)
            top, total, acc = tl.where(begins, top3, top), tl.where(begins, total3, total), tl.where(begins, acc3, acc)
            top2, total2 = tl.where(begins, float("-inf"), top2), tl.where(begins, 0.0, total2)
            acc2 = tl.where(begins, 0.0, acc2)
        numbers = first + tl.arange(0, T)
        inside = numbers < end
        places = numbers % ring if WINDOWED else numbers
        at = places.to(tl.int64)[:, None] * key_position + features[None, :]
        key = tl.load(keys + at, mask=inside[:, None] & wide[None, :], other=0.0)
        at = places.to(tl.int64)[:, None] * value_position + columns[None, :]
        value = tl.load(values + at, mask=inside[:, None] & (columns < F)[None, :], other=0.0)
        top2, total2, acc2 = _extended(top2, total2, acc2, query, key, value, inside, scale, CAP, IEEE)
    if part == 0:
        top2, total2, acc2 = _folded(top, total, acc, top2, total2, acc2)
    if SPLIT:
        chunk = (row * K + kv_head) * chunks + part
        tl.store(stats + chunk * (2 * M) + heads, top2, mask=real)
        tl.store(stats + chunk * (2 * M) + M + heads, total2, mask=real)
        tl.store(partial + (chunk * M + heads)[:, None] * F + columns[None, :], acc2, mask=stored)
    else:
        tl.store(out + place[:, None] * F + columns[None, :], acc2 / total2[:, None], mask=stored)


@triton.jit
def slot_attention_sum(
    stats, partial, slots, positions, out, last, chunks, W,
    K: tl.constexpr, M: tl.constexpr, F: tl.constexpr, FP: tl.constexpr,
    WINDOWED: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program adds the chunks of a query head of a row, from the first to the last."""
    program = tl.program_id(0).to(tl.int64)
    row, head = program // (K * M), program % (K * M)
    columns, one = tl.arange(0, FP), tl.arange(0, 1)
    inside = (one == 0)[:, None] & (columns < F)[None, :]
    target = out + program * F + one[:, None] + columns[None, :]
    slot, position = tl.load(slots + row), tl.load(positions + row).to(tl.int32)
    if slot == last:
        tl.store(target, tl.zeros([1, FP], tl.float32), mask=inside)
        return
    chunk = (row * K + head // M) * chunks
    stats += chunk * (2 * M) + head % M + one
    partial += (chunk * M + head % M) * F + one[:, None] + columns[None, :]
    top, total, acc = tl.load(stats), tl.load(stats + M), tl.load(partial, mask=inside, other=0.0)
    if WINDOWED:
        position = tl.minimum(position, W - 1)
    for number in tl.range(1, (position + C - 1) // C, num_stages=STAGES):
        top2, total2 = tl.load(stats + number * (2 * M)), tl.load(stats + number * (2 * M) + M)
        acc2 = tl.load(partial + number * (M * F), mask=inside, other=0.0)
        top, total, acc = _folded(top, total, acc, top2, total2, acc2)
    tl.store(target, acc / total[:, None], mask=inside)
