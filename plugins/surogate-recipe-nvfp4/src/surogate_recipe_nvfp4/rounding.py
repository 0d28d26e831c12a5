"""What every product of the recipe uses, and the rounding of a tensor's values for reports."""

from __future__ import annotations

from torch import Tensor

from surogate_core.formats import fp4
from surogate_core.formats.nvfp4 import BLOCK, quantise

FIRST_SALT = 64
"""First index of the slots' random bits, distinct from those of their dropout masks."""


def rounded(x: Tensor, role: str, *, four_over_six: bool) -> tuple[Tensor, Tensor]:
    """(the rounded values of x in fp32, a mask of values beyond the largest of their block). Gradients round to
    nearest.
    """
    found = quantise(x, square=role == "weight", four_over_six=four_over_six)
    height = found.codes.shape[0] // found.scales.shape[0]
    tops = found.scales.float().repeat_interleave(height, 0).repeat_interleave(BLOCK, 1) * fp4.LARGEST * found.decode
    rows, columns = x.shape
    return found.blocks(rows, columns) * found.decode, x.float().abs() > tops[:rows, :columns]
