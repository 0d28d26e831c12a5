"""Cross-entropy in Triton: logits are read once for the loss and once for their gradient.

Names: N tokens, V logits of a token, C of them at a time.
"""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy(logits, labels, loss, lse, row_stride, V, IGNORED: tl.constexpr, C: tl.constexpr):
    """One program a token: lse[N] = log Σ exp(logits), loss[N] = lse − logits[label], 0 where it is ignored."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    tops = tl.full([C], float("-inf"), tl.float32)
    sums = tl.zeros([C], tl.float32)
    for first in tl.range(0, V, 4 * C):
        columns = first + tl.arange(0, C)
        # Four at a time share the rescaling of the sums: five exponentials, not eight.
        a = tl.load(base + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        b = tl.load(base + C + columns, mask=C + columns < V, other=float("-inf")).to(tl.float32)
        c = tl.load(base + 2 * C + columns, mask=2 * C + columns < V, other=float("-inf")).to(tl.float32)
        d = tl.load(base + 3 * C + columns, mask=3 * C + columns < V, other=float("-inf")).to(tl.float32)
        top = tl.maximum(tops, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
        # A lane that has seen −inf alone: exp(−inf − 0) = 0, where −inf − (−inf) would be NaN.
        safe = tl.where(top == float("-inf"), 0.0, top)
        sums = sums * tl.exp(tops - safe) + (tl.exp(a - safe) + tl.exp(b - safe) + tl.exp(c - safe) + tl.exp(d - safe))
        tops = top
    top = tl.max(tops, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(sums * tl.exp(tops - safe), 0)
    result = safe + tl.log(total)
    label = tl.load(labels + row)
    trained = label != IGNORED
    picked = tl.load(base + tl.where(trained, label, 0)).to(tl.float32)
    tl.store(lse + row, result)
    tl.store(loss + row, tl.where(trained, result - picked, 0.0))


@triton.jit
def cross_entropy_backward(
    logits, labels, lse, dloss, out, row_stride, out_stride, V, IGNORED: tl.constexpr, C: tl.constexpr
):
    """A program has C logits of one token: out = (softmax − one-hot) · dloss."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    inside = columns < V
    label = tl.load(labels + row)
    factor = tl.where(label != IGNORED, tl.load(dloss + row), 0.0)
    x = tl.load(logits + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    softmax = tl.exp(x - tl.load(lse + row))
    value = (softmax - tl.where(columns == label, 1.0, 0.0)) * factor
    tl.store(out + row * out_stride + columns, value.to(out.dtype.element_ty), mask=inside)
