"""Norm over a head's features and rotation in Triton, forward and backward; every tensor is read and written once.

Names: N tokens, H query heads, K key/value heads, E head features, M tokens of a tile. A program
has one head's tile. A row of features is held as two halves, which the rotation mixes.
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _halves(pointer, rows, stride, inside, E: tl.constexpr):
    columns = tl.arange(0, E // 2)
    place = pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    first = tl.load(place, mask=inside[:, None], other=0.0)
    second = tl.load(place + E // 2, mask=inside[:, None], other=0.0)
    return first, second


@triton.jit
def _angles(cos, sin, rows, inside, E: tl.constexpr):
    place = rows[:, None] * (E // 2) + tl.arange(0, E // 2)[None, :]
    return tl.load(cos + place, mask=inside[:, None], other=0.0), tl.load(sin + place, mask=inside[:, None], other=0.0)


@triton.jit
def norm_rope(
    q,
    k,
    q_norm,
    k_norm,
    cos,
    sin,
    q_out,
    k_out,
    eps,
    tokens,
    q_row,
    k_row,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
):
    """q_out[N, H, E], k_out[N, K, E]; roundings are those of `ops.rms_norm` and `ops.rope`."""
    head = tl.program_id(0) % (H + K)
    rows = tl.program_id(0) // (H + K) * M + tl.arange(0, M)
    inside = rows < tokens
    columns = tl.arange(0, E // 2)
    if head < H:
        x, norm, out, stride, out_row = q + head * E, q_norm, q_out + head * E, q_row, H * E
    else:
        x, norm, out, stride, out_row = k + (head - H) * E, k_norm, k_out + (head - H) * E, k_row, K * E
    first, second = _halves(x, rows, stride, inside, E)
    kind = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / E + eps)[:, None]
    weight_a = tl.load(norm + columns).to(tl.float32)[None, :]
    weight_b = tl.load(norm + E // 2 + columns).to(tl.float32)[None, :]
    a = (weight_a * (a * inverse).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    b = (weight_b * (b * inverse).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    c, s = _angles(cos, sin, rows, inside, E)
    place = out + rows.to(tl.int64)[:, None] * out_row + columns[None, :]
    tl.store(place, (a * c - b * s).to(kind), mask=inside[:, None])
    tl.store(place + E // 2, (b * c + a * s).to(kind), mask=inside[:, None])


@triton.jit
def norm_rope_backward(
    dq,
    dk,
    dv,
    q,
    k,
    q_norm,
    k_norm,
    cos,
    sin,
    out,
    norm_parts,
    eps,
    tokens,
    dq_row,
    dk_row,
    dv_row,
    q_row,
    k_row,
    out_row,
    H: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    NORMS: tl.constexpr,
):
    """out[N] = [dq | dk | dv | room]; norm_parts[tiles, H + K, E]: each program's part of the norms' gradients."""
    heads: tl.constexpr = H + 2 * K
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    rows = tile * M + tl.arange(0, M)
    inside = rows < tokens
    columns = tl.arange(0, E // 2)
    place = out + rows.to(tl.int64)[:, None] * out_row + head * E + columns[None, :]
    if head >= H + K:
        first, second = _halves(dv + (head - H - K) * E, rows, dv_row, inside, E)
        tl.store(place, first, mask=inside[:, None])
        tl.store(place + E // 2, second, mask=inside[:, None])
    else:
        if head < H:
            x, g, norm, x_row, g_row = q + head * E, dq + head * E, q_norm, q_row, dq_row
        else:
            x, g, norm, x_row, g_row = k + (head - H) * E, dk + (head - H) * E, k_norm, k_row, dk_row
        first, second = _halves(x, rows, x_row, inside, E)
        g_first, g_second = _halves(g, rows, g_row, inside, E)
        kind = first.dtype
        a, b = first.to(tl.float32), second.to(tl.float32)
        ga, gb = g_first.to(tl.float32), g_second.to(tl.float32)
        c, s = _angles(cos, sin, rows, inside, E)
        # The rotation by the opposite angle, rounded as the op's own backward rounds.
        ra = (ga * c + gb * s).to(kind).to(tl.float32)
        rb = (gb * c - ga * s).to(kind).to(tl.float32)
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / E + eps)[:, None]
        a, b = a * inverse, b * inverse
        if NORMS:
            part = norm_parts + (tile * (H + K) + head) * E + columns
            tl.store(part, tl.sum(ra * a, 0))
            tl.store(part + E // 2, tl.sum(rb * b, 0))
        ra = ra * tl.load(norm + columns).to(tl.float32)[None, :]
        rb = rb * tl.load(norm + E // 2 + columns).to(tl.float32)[None, :]
        mean = ((tl.sum(ra * a, 1) + tl.sum(rb * b, 1)) / E)[:, None]
        tl.store(place, ((ra - a * mean) * inverse).to(kind), mask=inside[:, None])
        tl.store(place + E // 2, ((rb - b * mean) * inverse).to(kind), mask=inside[:, None])
