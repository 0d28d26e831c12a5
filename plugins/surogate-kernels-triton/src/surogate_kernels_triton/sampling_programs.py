"""The choice of a token from a row of logits, and the bounds of what may be chosen, in Triton.

Names: V logits of a row, which PARTS programs share, B of them each, C at a time.
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _hashed(x):
    """`ops.hashed` of 32 bits."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(tokens, row_key, other, EXACT: tl.constexpr):
    """`decoding.gumbel` of these tokens. EXACT: by the functions that torch uses on a GPU."""
    bits = _hashed(_hashed(tokens ^ row_key) ^ other)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    if EXACT:
        return -libdevice.log(-libdevice.log1p(-uniform))
    else:
        # log(1 - x), divided by the error of 1 - x (W. Kahan).
        rest = 1.0 - uniform
        exact = tl.where(rest == 1.0, -uniform, tl.log(rest) * (uniform / (1.0 - tl.where(rest == 1.0, 0.0, rest))))
        return -tl.log(-exact)


@triton.jit
def _best(values, tokens):
    """The largest value and its token; of equal ones the lowest token."""
    value = tl.max(values, 0)
    return value, tl.min(tl.where(values == value, tokens, 0x7FFFFFFF), 0)


@triton.jit
def choose_part(
    logits, temperature, keys, numbers, bounds, lasts, tops, sums, values, tokens, row_stride, V,
    PARTS: tl.constexpr, B: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """A program has a part of a row: its largest logit, the sum of exp(logit − largest), its largest sum with noise and
    the token of that.
    """
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    heat = tl.load(temperature + row)
    first_key, second_key = tl.load(keys + 2 * row).to(tl.uint32), tl.load(keys + 2 * row + 1).to(tl.uint32)
    number = tl.load(numbers + row).to(tl.uint32)
    row_key = _hashed(first_key ^ _hashed(second_key + number * 0x1E3779B9))
    other = _hashed(row_key + second_key)
    bound, last = float("-inf"), V
    if BOUND:
        bound, last = tl.load(bounds + row), tl.load(lasts + row)
    lanes = tl.arange(0, C)
    top = tl.full([C], float("-inf"), tl.float32)
    total = tl.zeros([C], tl.float32)
    value = tl.full([C], float("-inf"), tl.float32)
    token = part * B + lanes
    for first in tl.range(0, B, C):
        columns = part * B + first + lanes
        inside = columns < V
        x = tl.load(logits + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, x)
        # A lane that has seen −inf alone: exp(−inf − 0) = 0, where −inf − (−inf) would be NaN. A NaN is in the sum.
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.exp(x - safe)
        top = new
        score = x
        if heat != 0.0:
            score = tl.div_rn(x, heat)
            if BOUND:
                kept = (score > bound) | ((score == bound) & (columns <= last))
                score = tl.where(kept, score, float("-inf"))
            score += _gumbel(columns.to(tl.uint32), row_key, other, EXACT)
        # As in torch, the first NaN is the largest.
        score = tl.where(score == score, score, float("inf"))
        score = tl.where(inside, score, float("-inf"))
        # Columns of a lane rise, so of equal values the first stays.
        token = tl.where(score > value, columns, token)
        value = tl.maximum(value, score)
    largest = tl.max(top, 0)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    place = tl.program_id(0)
    tl.store(tops + place, largest)
    tl.store(sums + place, tl.sum(total * tl.exp(top - safe), 0))
    value, token = _best(value, token)
    tl.store(values + place, value)
    tl.store(tokens + place, token)


@triton.jit
def choose_token(
    logits, tops, sums, values, tokens, chosen, logprobs, row_stride, V, PARTS: tl.constexpr, P: tl.constexpr
):
    """A program has a row: the token with the largest sum of its parts, and its log-probability. P: PARTS padded."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, P)
    real = parts < PARTS
    place = row * PARTS + parts
    top = tl.load(tops + place, mask=real, other=float("-inf"))
    largest = tl.max(top, 0)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.load(sums + place, mask=real, other=0.0) * tl.exp(top - safe), 0)
    value = tl.load(values + place, mask=real, other=float("-inf"))
    _, token = _best(value, tl.load(tokens + place, mask=real, other=0x7FFFFFFF))
    tl.store(chosen + row, token.to(tl.int64))
    logit = tl.load(logits + row * row_stride + token).to(tl.float32)
    tl.store(logprobs + row, logit - (safe + tl.log(total)))


@triton.jit
def _ordered(score):
    """32 bits whose order as unsigned numbers is that of the scores."""
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _score_of(ordered):
    """The inverse of `_ordered`."""
    bits = tl.where(ordered >> 31 == 1, ordered & 0x7FFFFFFF, ordered ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _sum_from(room, count, bound, top, WEIGHTED: tl.constexpr, C: tl.constexpr):
    """How many of the scores are at least `bound`, in their order, or the sum of their exp(score − top)."""
    total = tl.zeros([C], tl.float32 if WEIGHTED else tl.int32)
    for first in tl.range(0, count, C):
        places = first + tl.arange(0, C)
        score = tl.load(room + places, mask=places < count, other=float("-inf"))
        counts = (places < count) & (_ordered(score) >= bound)
        total += tl.where(counts, tl.exp(score - top), 0.0) if WEIGHTED else counts.to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _largest_bound(room, count, target, top, WEIGHTED: tl.constexpr, C: tl.constexpr):
    """The largest bound for which `_sum_from` reaches the target, bit by bit."""
    bound = tl.full([], 0, tl.uint32)
    step = tl.full([], 0x80000000, tl.uint32)
    for _ in tl.range(0, 32):
        reached = _sum_from(room, count, bound | step, top, WEIGHTED, C) >= target
        bound = tl.where(reached, bound | step, bound)
        step = step >> 1
    return bound


@triton.jit
def _gather(logits, room, V, heat, top, least, C: tl.constexpr):
    """Write the scores from `least` on into `room`, in order. (their number, their sum of exp, that of all scores)."""
    count = tl.full([], 0, tl.int32)
    part, whole = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for first in tl.range(0, V, C):
        columns = first + tl.arange(0, C)
        x = tl.load(logits + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        score = tl.div_rn(x, heat)
        chosen = (score >= least) & (columns < V)
        weight = tl.exp(score - top)
        whole += weight
        part += tl.where(chosen, weight, 0.0)
        numbers = tl.cumsum(chosen.to(tl.int32), 0)
        tl.store(room + count + numbers - 1, score, mask=chosen)
        count += tl.sum(chosen.to(tl.int32), 0)
    return count, tl.sum(part, 0), tl.sum(whole, 0)


@triton.jit
def _nth(logits, V, heat, bound, wanted, C: tl.constexpr):
    """The column of the score number `wanted`, from 1, of those that equal `bound`."""
    seen, found = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for first in tl.range(0, V, C):
        columns = first + tl.arange(0, C)
        x = tl.load(logits + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        equal = ((tl.div_rn(x, heat) == bound) & (columns < V)).to(tl.int32)
        numbers = seen + tl.cumsum(equal, 0)
        found += tl.sum(tl.where((equal == 1) & (numbers == wanted), columns, 0), 0)
        seen += tl.sum(equal, 0)
    return found


@triton.jit
def token_bounds(
    logits, temperature, top_k, top_p, min_p, room, bounds, lasts, row_stride, V, REACH: tl.constexpr, C: tl.constexpr
):
    """A program has a row. Its scores within REACH of the largest are gathered; if they cannot decide, all are.

    room: [N, V] fp32.
    """
    row = tl.program_id(0).to(tl.int64)
    heat, k = tl.load(temperature + row), tl.load(top_k + row).to(tl.int32)
    share, ratio = tl.load(top_p + row), tl.load(min_p + row)
    if (heat == 0.0) | ((k <= 0) & (share >= 1.0) & (ratio <= 0.0)):
        tl.store(bounds + row, float("-inf"))
        tl.store(lasts + row, V)
        return
    logits += row * row_stride
    room += row * V
    largest = tl.full([C], float("-inf"), tl.float32)
    for first in tl.range(0, V, C):
        columns = first + tl.arange(0, C)
        x = tl.load(logits + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
    top = tl.div_rn(tl.max(largest, 0), heat)
    k = tl.minimum(k, V)
    count, mass, whole = _gather(logits, room, V, heat, top, top - REACH, C)
    few = count < k if k > 0 else mass < share * whole
    if few:
        # What is written again must not be overtaken by what was written before.
        tl.debug_barrier()
        count, mass, whole = _gather(logits, room, V, heat, top, float("-inf"), C)
    # The scores that the program has just written are read by other threads of it.
    tl.debug_barrier()
    bound = float("-inf")
    last = V
    if k > 0:
        best = _largest_bound(room, count, k, top, False, C)
        bound = _score_of(best)
        whole = _sum_from(room, count, best, top, True, C)
    if share < 1.0:
        best = _largest_bound(room, count, share * whole, top, True, C)
        bound = _score_of(best)
        before = _sum_from(room, count, best + 1, top, True, C)
        wanted = tl.maximum(tl.ceil((share * whole - before) / tl.exp(bound - top)), 1.0).to(tl.int32)
        equal = _sum_from(room, count, best, top, False, C) - _sum_from(room, count, best + 1, top, False, C)
        if wanted < equal:
            last = _nth(logits, V, heat, bound, wanted, C)
    if ratio > 0.0:
        least = top + tl.log(ratio)
        last = tl.where(least > bound, V, last)
        bound = tl.maximum(bound, least)
    tl.store(bounds + row, bound)
    tl.store(lasts + row, last)
