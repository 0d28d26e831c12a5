"""AdamW in Triton: every tensor read and written once."""

# Triton reads the signatures itself: they have no types but `tl.constexpr`.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from surogate_kernels_triton.random_programs import hash32


@triton.jit
def _stochastic_bf16(x, counter, key):
    """`rounding.stochastic_bf16` of fp32 x with the bits of elements `counter`."""
    whole = x.to(tl.int32, bitcast=True)
    raised = (whole + (hash32(counter ^ key) & 0xFFFF)) & -0x10000
    finite = (whole & 0x7F800000) != 0x7F800000
    return tl.where(finite, raised, whole).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def adamw_update(
    master,
    grad,
    first,
    second,
    lr,
    clip,
    skip,
    correction1,
    correction2,
    seed,
    salt,
    length,
    weight_decay,
    rest1,
    beta2,
    rest2,
    epsilon,
    NARROW: tl.constexpr,
    PERIOD: tl.constexpr,
    C: tl.constexpr,
):
    """A program has C elements, and PERIOD, the elements under one salt, is a multiple of C. `rest` is 1 − beta."""
    if tl.load(skip) != 0:
        return
    start = tl.program_id(0).to(tl.int64) * C
    place = start + tl.arange(0, C)
    inside = place < length
    rate = tl.load(lr)
    g = tl.load(grad + place, mask=inside, other=0.0) * tl.load(clip)
    m = tl.load(first + place, mask=inside, other=0.0)
    v = tl.load(second + place, mask=inside, other=0.0)
    p = tl.load(master + place, mask=inside, other=0.0).to(tl.float32)
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    divisor = tl.sqrt_rn(tl.div_rn(v, tl.load(correction2))) + epsilon
    p = p * (1 - rate * weight_decay) - tl.div_rn(rate * m, tl.load(correction1) * divisor)
    tl.store(first + place, m, mask=inside)
    tl.store(second + place, v, mask=inside)
    if NARROW:
        key = hash32(tl.load(seed) + (salt + (start // PERIOD).to(tl.int32)) * 0x1E3779B9)
        counter = (start % PERIOD).to(tl.int32) + tl.arange(0, C)
        tl.store(master + place, _stochastic_bf16(p, counter, key), mask=inside)
    else:
        tl.store(master + place, p, mask=inside)
