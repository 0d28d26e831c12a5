"""Random choices of a problem that are the same in every process and with every version of NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

_WORDS = 64
"""Random words that are made at a time."""


class Draws:
    """The random choices of one problem, by its seed and number.

    They come from `numpy.random.SeedSequence`, whose output NumPy keeps the same for ever. The methods of
    `numpy.random.Generator` may change from one version to the next.
    """

    def __init__(self, seed: int, number: int, *key: int) -> None:
        self._root = (seed, number, *key)
        self._words: list[int] = []
        self._blocks = 0

    def _word(self) -> int:
        if not self._words:
            source = np.random.SeedSequence(self._root, spawn_key=(self._blocks,))
            self._words = source.generate_state(_WORDS, np.uint64).tolist()[::-1]
            self._blocks += 1
        return self._words.pop()

    def below(self, end: int) -> int:
        """A number of 0 … `end` - 1, all equally likely."""
        assert 0 < end <= 2**63
        limit = 2**64 - 2**64 % end
        while (word := self._word()) >= limit:
            pass
        return word % end

    def between(self, first: int, last: int) -> int:
        """A number of `first` … `last`, both included."""
        return first + self.below(last - first + 1)

    def choice(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.below(len(values))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """The values in a random order."""
        found = list(values)
        for last in range(len(found) - 1, 0, -1):
            other = self.below(last + 1)
            found[last], found[other] = found[other], found[last]
        return found
