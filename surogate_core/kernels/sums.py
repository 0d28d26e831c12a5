"""Sums in the order of a binary tree, whose bits do not depend on who adds what.

Shape suffixes: N parts, K elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surogate_core.kernels.registry import op


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


@op
def add_tree_sum(total_K: Tensor, parts: Sequence[Tensor]) -> None:
    """Add the `tree_sum` of N parts [K] to `total_K`, in place, all fp32 and contiguous.

    The sum of the parts is rounded before it is added. The parts may be overwritten; `total_K` is none of them.
    """
    tree_sum(parts, parts[0])
    total_K.add_(parts[0])
