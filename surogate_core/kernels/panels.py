"""Adapted projections that read one input, with all their matrices in one.

A panel holds the frozen weights, the A's and the B's of LoRA (arXiv 2106.09685) in the compute
dtype, laid out so that low-rank products become a few more columns or rows of the frozen ones:

    [ W | scale · B ]   outputs rows        y  = [x | u] · [W | scale·B]ᵀ   with u = x Aᵀ
    [ A |     0     ]   rank rows           dx = [dy | du] · [W ; A]        with du = dy (scale·B)

With several projections W and A are stacked and B is block-diagonal, so that u is shared storage
and not a shared sum. Suffixes: N tokens, I inputs, R rank of one adapter, Q rows and P columns of
a panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

MULTIPLE = 16
"""Every side of a product on tensor cores, and 32 bytes of bf16."""
PITCH = 64
"""Rows begin at multiples of 128 bytes."""
MOST = 4
"""Projections of a panel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelShape:
    """The sizes of a panel and what its adapters do."""

    inputs: int
    outputs: tuple[int, ...]
    """Of each projection."""
    rank: int
    """Of each adapter."""
    scale: float
    dropout: float
    salts: tuple[int, ...]
    """What separates the projections' dropout masks; see `ops.dropout`."""

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
        """Whether kernels can be asked to work on such a panel."""
        sides = (self.inputs, self.rank, *self.outputs)
        return all(n % MULTIPLE == 0 for n in sides) and len(self.outputs) <= MOST

    def allocate(self, device: torch.device, dtype: torch.dtype, *count: int) -> Tensor:
        """A panel of zeros, [Q, P], or `count` of them, [count, Q, P]."""
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

    def adapter(self, panel_QP: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The views of a projection's A, [R, I], and scale · B, [outputs, R]; of several panels at once too."""
        return self.of_edges(*self.edges(panel_QP), number)

    def load(self, panel_QP: Tensor, adapters: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy A's [R, I] and B's [outputs, R] in, rounded to the panel's dtype."""
        for number, (a_RI, b_OR) in enumerate(adapters):
            a, b = self.adapter(panel_QP, number)
            a.copy_(a_RI)
            b.copy_(b_OR * self.scale)
