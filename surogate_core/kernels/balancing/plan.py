"""Which rows of which experts another rank computes, so that all ranks of a group have equally many.

Each rank of a group knows the rows of every expert, and so makes the same plan, without an exchange and without the
host. A rank with more rows than the mean gives the first rows of its largest experts; a rank with fewer takes them.
Givers and takers are lined up by what they give or take, the largest first and of equal ones the lowest number, and the
rows follow each other along both lines. An expert may be divided among its own rank and several others.

Shape suffixes: C ranks that share out experts, E experts, G = E / C experts of a rank, P experts that a rank may give
to each other rank, o the rank that an expert belongs to, h one that helps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SLOTS = 4
"""Experts of other ranks for which a rank has room, of two ranks."""
PAIR = 2
"""The same for each of the other ranks, of more."""
LEAST = 128
"""Fewer rows are not worth an expert's weights, where the mean load is at least `PART` times as large."""
PART = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBalance:
    """When the loads of ranks are evened out, and how many experts may be moved for it."""

    threshold: float
    """The largest load of a rank, as a multiple of the mean, that is left as it is."""
    slots: int = SLOTS

    def given(self, ranks: int, own: int) -> int:
        """P, experts that a rank, which has `own`, may give to each other rank."""
        return min(own, max(PAIR, -(-self.slots // (ranks - 1))))

    def taken(self, ranks: int, own: int) -> int:
        """Q, experts of other ranks for which a rank has room."""
        return self.given(ranks, own) * (ranks - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The rows that other ranks than their experts' compute."""

    experts_oPh: Tensor
    """[C, P, C]: number of the expert among those of rank o, of which rank h computes rows; any where it has none."""
    starts_oPh: Tensor
    """The first of these rows, counted from the expert's first."""
    rows_oPh: Tensor
    """How many they are."""

    def of_experts(self, values_oPh: Tensor, own: int) -> Tensor:
        """[E, C]: the values by expert and helping rank, 0 where nothing moves."""
        found_oGh = values_oPh.new_zeros(len(values_oPh), own, len(values_oPh))
        used_oPh = torch.where(self.rows_oPh > 0, values_oPh, 0)
        return found_oGh.scatter(1, self.experts_oPh, used_oPh).flatten(0, 1)

    def loads(self, loads_C: Tensor) -> Tensor:
        """[C]: the rows that each rank computes, of those that the experts of each have."""
        return loads_C - self.rows_oPh.sum((1, 2)) + self.rows_oPh.sum((0, 1))


def least_rows(mean: int) -> int:
    """The fewest rows that move."""
    return max(1, min(LEAST, mean // PART))


def moves(counts_E: Tensor, ranks: int, mean: int, balance: LoadBalance) -> Moves:
    """The plan for experts that have these numbers of rows, C · `mean` together."""
    counts_CG = counts_E.long().view(ranks, -1)
    loads_C = counts_CG.sum(1)
    uneven = loads_C.max() > balance.threshold * mean
    given_C = torch.where(uneven, (loads_C - mean).clamp(min=0), 0)
    taken_C = torch.where(uneven, (mean - loads_C).clamp(min=0), 0)
    first_o1, first_1h = _line(given_C)[:, None], _line(taken_C)[None]
    # Where the rows that o gives to h begin among those that o gives, and where they end.
    from_oh = torch.maximum(first_o1, first_1h) - first_o1
    to_oh = torch.minimum(first_o1 + given_C[:, None], first_1h + taken_C) - first_o1
    order_CG = torch.argsort(counts_CG, dim=1, descending=True, stable=True)
    sorted_CG = counts_CG.gather(1, order_CG)
    first_CG = sorted_CG.cumsum(1) - sorted_CG
    begin_oGh = torch.maximum(first_CG[:, :, None], from_oh[:, None])
    end_oGh = torch.minimum((first_CG + sorted_CG)[:, :, None], to_oh[:, None])
    rows_oGh = (end_oGh - begin_oGh).clamp(min=0)
    largest_oPh = torch.argsort(rows_oGh, dim=1, descending=True, stable=True)[
        :, : balance.given(ranks, counts_CG.shape[1])
    ]
    rows_oPh = rows_oGh.gather(1, largest_oPh)
    rows_oPh = torch.where(rows_oPh >= least_rows(mean), rows_oPh, 0)
    starts_oGh = begin_oGh - first_CG[:, :, None]
    return Moves(
        experts_oPh=order_CG[:, :, None].expand_as(rows_oGh).gather(1, largest_oPh),
        starts_oPh=starts_oGh.gather(1, largest_oPh),
        rows_oPh=rows_oPh,
    )


def _line(rows_C: Tensor) -> Tensor:
    """[C]: where the rows of each rank begin in a line of all, the largest first."""
    order_C = torch.argsort(rows_C, descending=True, stable=True)
    sorted_C = rows_C[order_C]
    return torch.zeros_like(rows_C).scatter(0, order_C, sorted_C.cumsum(0) - sorted_C)
