"""The choice of a token from a row of logits, in Triton.

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
    logits, temperature, keys, numbers, tops, sums, values, tokens, row_stride, V,
    PARTS: tl.constexpr, B: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr,
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
            score = tl.div_rn(x, heat) + _gumbel(columns.to(tl.uint32), row_key, other, EXACT)
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
