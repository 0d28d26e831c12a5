"""The order in which a step's gradients are added: the same for 1, 2, 4 and 8 ranks.

A step's M micro-batches are divided into L lanes (`mesh.sums.lanes_of`), whose sums are added by a binary tree. A rank
adds the low levels of the tree itself, and the ranks the rest, or the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surogate_core.mesh.sums import lanes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's micro-batches of a step, and how it adds their gradients."""

    numbers: range
    """Numbers of the micro-batches that it runs, in order."""
    unit: int
    """Micro-steps that are added one after another: a leaf of the rank's tree."""
    leaves: int
    """Leaves of a tree; the sums of its trees are added one after another."""

    @classmethod
    def of(cls, micro_batches: int, *, rank: int, ranks: int, exact: bool, strided: bool) -> Share:
        """The share of a rank. `strided`: ranks take turns, because sums over ranks come first; else each rank has
        consecutive micro-batches.
        """
        assert micro_batches % ranks == 0, f"{micro_batches} micro-batches for {ranks} ranks"
        own = micro_batches // ranks
        numbers = range(rank, micro_batches, ranks) if strided else range(rank * own, (rank + 1) * own)
        lanes = lanes_of(micro_batches)
        if not exact or lanes % ranks:
            return cls(numbers=numbers, unit=own, leaves=1)
        leaves = lanes // ranks
        return cls(numbers=numbers, unit=1 if strided else own // leaves, leaves=leaves)

    @property
    def simple(self) -> bool:
        """Whether all micro-steps are added one after another, into the same sums."""
        return self.unit == len(self.numbers)


class Lanes:
    """Adds flat gradient sums by binary trees."""

    def __init__(self, sums: Sequence[Tensor]):
        """`sums`: the live tensors to which micro-steps add."""
        self._sums = tuple(sums)
        self._levels: list[list[Tensor]] = []
        """Level of the tree → the sums that wait there for their neighbour's."""
        self._total: list[Tensor] = []

    def after(self, share: Share, micro_step: int) -> bool:
        """Take the sums over after a rank's micro-step; returns whether the next one begins with zeros.

        After the last one, the tensors have the sums of the whole share.
        """
        if share.simple or (micro_step + 1) % share.unit:
            return False
        done = (micro_step + 1) // share.unit
        leaf, tree = (done - 1) % share.leaves, (done - 1) // share.leaves
        level = 0
        while leaf >> level & 1:
            torch._foreach_add_(self._sums, self._levels[level])
            level += 1
        if leaf < share.leaves - 1:
            self._keep(level)
        elif share.unit * share.leaves < len(share.numbers):
            self._add_tree(first=tree == 0, last=micro_step + 1 == len(share.numbers))
        if micro_step + 1 == len(share.numbers):
            return False
        torch._foreach_zero_(self._sums)
        return True

    def _keep(self, level: int) -> None:
        while level >= len(self._levels):
            self._levels.append([torch.empty_like(total) for total in self._sums])
        torch._foreach_copy_(self._levels[level], self._sums)

    def _add_tree(self, *, first: bool, last: bool) -> None:
        if not self._total:
            self._total = [torch.empty_like(total) for total in self._sums]
        if first:
            torch._foreach_copy_(self._total, self._sums)
        else:
            torch._foreach_add_(self._total, self._sums)
        if last:
            torch._foreach_copy_(self._sums, self._total)
