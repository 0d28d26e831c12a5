"""Ranges of flat groups of which each rank owns a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A piece's contiguous range of a flat group, one part of which each rank owns."""

    owners: Sequence[tuple[int, int]]
    """(start, stop) of each part, in elements from the start of the range. The parts follow each other; the last ones
    may be shorter, or empty.
    """
    shard: Tensor
    """This rank's part: live, 1-D."""

    @property
    def elements(self) -> int:
        """Elements of the range."""
        return self.owners[-1][1]

    @property
    def longest(self) -> int:
        """Elements of the longest part."""
        return max(stop - start for start, stop in self.owners)


@dataclass(frozen=True, slots=True)
class Within:
    """A tensor's place in the range of a piece, which for a tied tensor is another piece than the tensor's."""

    piece: str
    offset: int
    """In elements."""
    shape: tuple[int, ...]
