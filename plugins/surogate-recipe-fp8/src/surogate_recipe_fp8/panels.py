"""Adapted slots with frozen weights in one FP8 product with their adapters: the op `scaled_linears`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from surogate_core.plugin import fp8

if TYPE_CHECKING:
    from surogate_core.plugin import compute


@dataclass(frozen=True, slots=True)
class ScaledPanels:
    """The panel op of the recipe; its rows of state are delayed scales (`surogate_core.bundles.PanelOp`)."""

    margin: int
    """Scales are divided by 2^margin."""
    op: str = "scaled_linears"

    def fits(self, shape: compute.PanelShape, tokens: int) -> bool:
        """Whether sides and tokens are multiples of the op's tiles."""
        return fp8.fits(shape, tokens)

    def pack(self, weight_OI: Tensor) -> Tensor:
        """1 / the weight's scale, its codes in tiles, and those of its transpose, as bytes."""
        return fp8.pack(weight_OI, self.margin)

    def multiply(
        self,
        x_NI: Tensor,
        panel: Tensor,
        seed: Tensor | None,
        shape: compute.PanelShape,
        weights: Sequence[Tensor],
        rows: Sequence[Tensor],
        adapters: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """[N, O] of each slot; see the op."""
        return fp8.scaled_linears(x_NI, panel, seed, shape, self.margin, weights, rows, *adapters)
