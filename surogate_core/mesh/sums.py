"""Sums in a fixed order: the same bits for any number of ranks.

Shape suffixes: N ranks, K elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LANES = 8
"""Most lanes of a step, so the largest number of ranks that give equal bits."""


def lanes_of(micro_batches: int) -> int:
    """Lanes into which a step's micro-batches are divided: the largest power of two that divides them, 8 at most."""
    return min(micro_batches & -micro_batches, LANES)


def lanes_for(ranks: int) -> int:
    """Lanes of steps of any number of micro-batches: `LANES`, or one for each rank if `ranks` does not divide it."""
    return LANES if LANES % ranks == 0 else ranks


def tree_sum(parts: Sequence[Tensor], out: Tensor) -> None:
    """`out` = the sum of the parts by a binary tree over neighbours; the parts are overwritten, `out` may be one.

    If their number is no power of two, they are added in order.
    """
    count = len(parts)
    if count & (count - 1):
        for part in parts[1:]:
            parts[0].add_(part)
    else:
        distance = 1
        while 2 * distance < count:
            for i in range(0, count, 2 * distance):
                parts[i].add_(parts[i + distance])
            distance *= 2
        if count > 1:
            torch.add(parts[0], parts[distance], out=out)
            return
    if out.data_ptr() != parts[0].data_ptr():
        out.copy_(parts[0])
