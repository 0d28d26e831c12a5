"""Sums in the order of a binary tree, whose bits do not depend on who adds what, and sums of products of codes.

Shape suffixes: N parts, K elements; of products N tokens, O and I the sides of a weight.
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


@op
def sum_coded_product(
    total_OI: Tensor, left_ON: Tensor, right_NI: Tensor, inverse_left: Tensor, inverse_right: Tensor, add: bool
) -> None:
    """Add (left · inverse_left)(right · inverse_right) to `total_OI` in place, or write it there unless `add`.

    `left_ON` and the transpose of `right_NI` are FP8 codes with N contiguous, e4m3 or e5m2, not both e5m2; the inverses
    of their scales are 0-d fp32. The product is summed in fp32, and not rounded before it is added to an fp32 total.
    """
    if total_OI.device.type == "cuda":
        # Its sides are multiples of 16, or the recipe had not multiplied codes.
        product = torch._scaled_mm(
            left_ON, right_NI, scale_a=inverse_left, scale_b=inverse_right, out_dtype=total_OI.dtype
        )
    else:
        product = (left_ON.float() @ right_NI.float()) * (inverse_left * inverse_right)
    if add:
        total_OI.add_(product)
    else:
        total_OI.copy_(product)
