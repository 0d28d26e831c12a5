"""What every product of the recipe uses, and the rounding of a tensor's values for reports."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from surogate_core.plugin import fp4, nvfp4


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """How frozen weights are rounded."""

    four_over_six: bool
    height: int = nvfp4.BLOCK
    """Rows of a block. One row: blocks are along the inner dimension of each product."""
    search: bool = False
    """Choose block scales by `searched`."""

    def square(self, weight_OI: Tensor) -> nvfp4.Quantised:
        """The weight in blocks of 16×16."""
        return nvfp4.quantise(weight_OI, square=True, four_over_six=self.four_over_six, search=self.search)

    def quantised(self, weight_OI: Tensor) -> nvfp4.Quantised:
        """The weight in its blocks."""
        if self.height == nvfp4.BLOCK:
            return self.square(weight_OI)
        return nvfp4.quantise(weight_OI, square=False, four_over_six=self.four_over_six, search=self.search)

    def layouts(self, weight_OI: Tensor) -> tuple[nvfp4.Quantised, nvfp4.Quantised]:
        """The weight for the product forward, and its transpose for the product backward."""
        found = self.quantised(weight_OI)
        return found, found.t() if self.height == nvfp4.BLOCK else self.quantised(weight_OI.t())


FIRST_SALT = 64
"""First index of the slots' random bits, distinct from those of their dropout masks."""


def rounded(x: Tensor, role: str, frozen: Frozen) -> tuple[Tensor, Tensor]:
    """(the rounded values of x in fp32, a mask of values beyond the largest of their block). Gradients round to
    nearest.
    """
    if role == "weight":
        found = frozen.quantised(x)
    else:
        found = nvfp4.quantise(x, square=False, four_over_six=frozen.four_over_six)
    height = found.codes.shape[0] // found.scales.shape[0]
    tops = (
        found.scales.float().repeat_interleave(height, 0).repeat_interleave(nvfp4.BLOCK, 1) * fp4.LARGEST * found.decode
    )
    rows, columns = x.shape
    return found.blocks(rows, columns) * found.decode, x.float().abs() > tops[:rows, :columns]
