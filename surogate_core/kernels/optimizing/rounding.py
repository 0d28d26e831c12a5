"""Writing bf16 masters by stochastic rounding, so that updates smaller than half a step are not lost.

The random numbers are a function of the group's seed, which the engine sets anew for each optimizer step, and of
the element's place in its group: replayed, resumed and cut in other pieces the bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surogate_core.bundles import ParamGroup
from surogate_core.kernels.ops import random_bits, random_key

PERIOD = 1 << 30
"""Elements that are counted under one salt; a counter is an int32."""
SALTS = 1 << 10
"""Salts of a group."""


def stochastic_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Stochastic rounding of fp32 `x` to one of its two bf16 neighbours, by the low 16 of the int32 `bits`.

    The mean over the bits is `x`. bf16 values and values that are not finite do not change. A value next to the largest
    may become infinite, as with rounding to nearest.
    """
    raised = ((x.view(torch.int32) + (bits & 0xFFFF)) & -0x10000).view(torch.float32)
    # The fraction of a NaN could be carried away.
    return torch.where(x.isfinite(), raised, x).to(torch.bfloat16)


def place(group: ParamGroup, start: int) -> tuple[int, int]:
    """(salt, number under it) of element `start` of the group. No group that is a part of a larger one crosses a
    multiple of `PERIOD` of that one.
    """
    number = group.first + start
    return group.number * SALTS + number // PERIOD, number % PERIOD


def master_key(group: ParamGroup, start: int) -> Tensor:
    """0-d int32 that the numbers of elements of bf16 masters are mixed with from element `start` on, a `PERIOD` far."""
    assert group.seed is not None
    return random_key(group.seed, place(group, start)[0])


def write_master(group: ParamGroup, start: int, value: Tensor) -> None:
    """Set the masters of the group from element `start` on to an fp32 `value` of any shape.

    fp32 masters are copied to, bf16 masters written with stochastic rounding: only a value that differs from the
    master changes it.
    """
    target = group.master[start : start + value.numel()].view(value.shape)
    if group.seed is not None:
        salt, first = place(group, start)
        value = stochastic_bf16(value, random_bits(value.shape, group.seed, salt=salt, first=first))
    target.copy_(value)
