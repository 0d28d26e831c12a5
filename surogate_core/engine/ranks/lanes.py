"""The order in which a step's gradients are added: the same for 1, 2, 4 and 8 ranks.

A step's M micro-batches are divided into L lanes (`mesh.sums.lanes_of`), whose sums are added by a binary tree. A rank
adds the low levels of the tree itself, and the ranks the rest, or the other way round. Where the number of
micro-batches varies, a step always has `LANES` lanes, some of which may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from surogate_core.mesh.sums import LANES, lanes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's micro-batches of a step, and how it adds their gradients."""

    numbers: Sequence[int]
    """Numbers of the micro-batches that it runs, in order. A number that the step does not have is a micro-step without
    tokens, which this rank runs because the others need it.
    """
    leaves: int
    """Leaves of a tree; the sums of its trees are added one after another."""
    sizes: Sequence[int]
    """Micro-steps of each leaf of all trees, in order; they are added one after another. A leaf may have none."""

    @classmethod
    def of(cls, micro_batches: int, *, rank: int, ranks: int, exact: bool, strided: bool) -> Share:
        """The share of a rank. `strided`: ranks take turns, because sums over ranks come first; otherwise each has
        consecutive micro-batches.
        """
        assert micro_batches % ranks == 0, f"{micro_batches} micro-batches for {ranks} ranks"
        own = micro_batches // ranks
        numbers = range(rank, micro_batches, ranks) if strided else range(rank * own, (rank + 1) * own)
        lanes = lanes_of(micro_batches)
        if not exact or lanes % ranks:
            return cls(numbers=numbers, leaves=1, sizes=(own,))
        leaves = lanes // ranks
        unit = 1 if strided else own // leaves
        return cls(numbers=numbers, leaves=leaves, sizes=(unit,) * (own // unit))

    @classmethod
    def of_any(cls, micro_batches: int, *, rank: int, ranks: int, exact: bool, strided: bool) -> Share:
        """The share of a rank in a step of any number of micro-batches.

        Exact sums have `LANES` lanes, as equally filled as possible, so that their order depends on `micro_batches`
        alone. If `strided`, every rank has equally many micro-steps; otherwise a rank may have none.
        """
        exact = exact and LANES % ranks == 0
        if strided:
            rows = -(-micro_batches // ranks)
            numbers = range(rank, rows * ranks, ranks)
            if not exact:
                return cls(numbers=numbers, leaves=1, sizes=(rows,))
            leaves = LANES // ranks
            return cls(numbers=numbers, leaves=leaves, sizes=(1,) * rows + (0,) * (-rows % leaves))
        lanes = LANES if exact else ranks
        leaves = lanes // ranks
        borders = [-(-lane * micro_batches // lanes) for lane in range(rank * leaves, (rank + 1) * leaves + 1)]
        sizes = tuple(b - a for a, b in pairwise(borders))
        return cls(numbers=range(borders[0], borders[-1]), leaves=leaves, sizes=sizes)

    @property
    def simple(self) -> bool:
        """Whether all micro-steps are added one after another, into the same sums."""
        return len(self.sizes) == 1

    def begins_leaf(self, micro_step: int) -> bool:
        """Whether a micro-step is the first of its leaf."""
        return micro_step in accumulate(self.sizes[:-1], initial=0)

    def ended(self, micro_steps: int) -> list[int]:
        """The leaves that are complete after this number of micro-steps, and not after fewer."""
        return [leaf for leaf, stop in enumerate(accumulate(self.sizes)) if stop == micro_steps]


class Lanes:
    """Adds flat gradient sums by binary trees."""

    def __init__(self, sums: Sequence[Tensor]):
        """`sums`: the live tensors to which micro-steps add."""
        self._sums = tuple(sums)
        self._levels: list[list[Tensor]] = []
        """Level of the tree → the sums that wait there for their neighbour's."""
        self._total: list[Tensor] = []

    def begin(self, share: Share) -> None:
        """A rank's first micro-step is next, and the sums are zeros."""
        self._end(share, 0)

    def after(self, share: Share, micro_step: int) -> bool:
        """Take the sums over after a rank's micro-step; returns whether the next one begins with zeros.

        After the last one, the tensors have the sums of the whole share.
        """
        return self._end(share, micro_step + 1)

    def _end(self, share: Share, micro_steps: int) -> bool:
        """Take over the sums of the leaves that are complete, and begin the next one with zeros, which is returned."""
        if share.simple:
            return False
        begins = False
        for leaf in share.ended(micro_steps):
            self._end_leaf(share, leaf)
            begins = leaf + 1 < len(share.sizes)
            if begins:
                torch._foreach_zero_(self._sums)
        return begins

    def _end_leaf(self, share: Share, number: int) -> None:
        leaf, tree, last = number % share.leaves, number // share.leaves, number + 1 == len(share.sizes)
        level = 0
        while leaf >> level & 1:
            torch._foreach_add_(self._sums, self._levels[level])
            level += 1
        if leaf < share.leaves - 1:
            self._keep(level)
        elif share.leaves < len(share.sizes):
            self._add_tree(first=tree == 0, last=last)

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
