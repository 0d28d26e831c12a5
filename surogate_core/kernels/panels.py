"""Adapted projections that read the same input, with all their matrices in one.

A panel holds the frozen weights, the A's and the B's of LoRA (arXiv 2106.09685) in the compute dtype, laid out so that
the low-rank products are a few more columns or rows of the frozen ones:

    [ W | scale · B ]   outputs rows        y  = [x | u] · [W | scale·B]ᵀ   with u = x Aᵀ
    [ A |     0     ]   rank rows           dx = [dy | du] · [W ; A]        with du = dy (scale·B)

With several projections W and A are stacked and B is block-diagonal, so the projections share the storage of u but not
its sum. A panel without frozen weights, for products that store those in another format, is A, Aᵀ and the
block-diagonal B in one row. Suffixes: N tokens, I inputs, R rank of one adapter, Q rows and P columns of a panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

MULTIPLE = 16
"""Sides are multiples of this: the tile of tensor cores, and 32 bytes of bf16."""
PITCH = 64
"""Rows begin at multiples of 128 bytes."""
MOST = 4
"""Largest number of projections of a panel."""
MOST_RANK = 128
"""Largest rank of an adapter in a panel; a program has all columns of one, a power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelShape:
    """The sizes of a panel and what its adapters do."""

    inputs: int
    outputs: tuple[int, ...]
    """Outputs of each projection."""
    rank: int
    """Rank of each adapter."""
    scale: float
    dropout: float
    salts: tuple[int, ...]
    """Salts that separate the projections' dropout masks; see `ops.dropout`."""
    frozen: bool = True
    """Whether the panel contains the frozen weights, or only adapters."""

    @property
    def width(self) -> int:
        """All outputs."""
        return sum(self.outputs)

    @property
    def ranks(self) -> int:
        """The ranks of all adapters."""
        return self.rank * len(self.outputs)

    @property
    def spans(self) -> tuple[slice, ...]:
        """Each projection's range of the outputs."""
        return tuple(slice(a, b) for a, b in pairwise(accumulate(self.outputs, initial=0)))

    @property
    def fits(self) -> bool:
        """Whether kernels support such a panel."""
        sides = (self.inputs, self.rank, *self.outputs)
        is_tile = self.rank <= MOST_RANK and self.rank & (self.rank - 1) == 0
        return is_tile and all(n % MULTIPLE == 0 for n in sides) and len(self.outputs) <= MOST

    def allocate(self, device: torch.device, dtype: torch.dtype, *count: int) -> Tensor:
        """A panel of zeros, [Q, P] or, with only adapters, in one row; or `count` of them."""
        if not self.frozen:
            size = self.ranks * (2 * self.inputs + self.width)
            return torch.zeros(*count, size, device=device, dtype=dtype)
        pitch = -(-(self.inputs + self.ranks) // PITCH) * PITCH
        return torch.zeros(*count, self.width + self.ranks, pitch, device=device, dtype=dtype)

    def weight(self, panel_QP: Tensor, number: int) -> Tensor:
        """The view of a projection's frozen weight, [outputs, I]; of several panels at once too."""
        return panel_QP[..., self.spans[number], : self.inputs]

    def edges(self, panel_QP: Tensor) -> tuple[Tensor, Tensor]:
        """The views of all A's, [ranks, I], and of all B's, [width, ranks]; of several panels at once too."""
        return panel_QP[..., self.width :, : self.inputs], panel_QP[
            ..., : self.width, self.inputs : self.inputs + self.ranks
        ]

    def of_edges(self, below: Tensor, beside: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The views of a projection's A, [R, I], and scale · B, [outputs, R], in edges of panels."""
        ranks = slice(self.rank * number, self.rank * (number + 1))
        return below[..., ranks, :], beside[..., self.spans[number], ranks]

    def parts(self, panel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The views A [ranks, I], Aᵀ [I, ranks] and B [outputs, ranks] of a panel with only adapters; of several panels
        too.
        """
        sizes = [self.ranks * self.inputs, self.ranks * self.inputs, self.width * self.ranks]
        sides = (self.ranks, self.inputs), (self.inputs, self.ranks), (self.width, self.ranks)
        flat = panel.split(sizes, dim=-1)
        a, a_t, b = (part.unflatten(-1, side) for part, side in zip(flat, sides, strict=True))
        return a, a_t, b

    def adapter(self, panel: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The views of a projection's A, [R, I], and scale · B, [outputs, R]; of several panels at once too."""
        ranks = slice(self.rank * number, self.rank * (number + 1))
        if self.frozen:
            return self.of_edges(*self.edges(panel), number)
        a, _, b = self.parts(panel)
        return a[..., ranks, :], b[..., self.spans[number], ranks]

    def places(self, panel: Tensor, number: int) -> list[tuple[str, Tensor, float]]:
        """The destinations of a projection's adapter: (``A`` or ``B``, view, factor); of several panels at once too."""
        a, b = self.adapter(panel, number)
        places = [("A", a, 1.0), ("B", b, self.scale)]
        if not self.frozen:
            ranks = slice(self.rank * number, self.rank * (number + 1))
            places.append(("A", self.parts(panel)[1][..., ranks].mT, 1.0))
        return places

    def load(self, panel_QP: Tensor, adapters: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy A's [R, I] and B's [outputs, R] in, rounded to the panel's dtype."""
        for number, (a_RI, b_OR) in enumerate(adapters):
            for which, view, factor in self.places(panel_QP, number):
                view.copy_(a_RI if which == "A" else b_OR * factor)
