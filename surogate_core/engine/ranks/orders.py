"""Work that all ranks do together at rank 0's word: how a checkpoint and an export read what is sharded.

Rank 0 writes files in an order that only it knows. The others wait in `serve` and take part in whatever it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from surogate_core.files.tensorfile import Deferred
from surogate_core.mesh.mesh import Mesh

_DISMISSED = float(2**40)


class Orders:
    """The tasks of a run by number. All ranks register the same ones in the same order."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._tasks: list[Callable[[], object]] = []

    def register(self, task: Callable[[], object]) -> int:
        """Number of a new task."""
        self._tasks.append(task)
        return len(self._tasks) - 1

    def call(self, number: int) -> None:
        """On rank 0: let the others do a task, in which this one takes part by itself."""
        if self._mesh.world > 1:
            assert self._mesh.leads
            self._mesh.largest([float(number)])

    def deferred(self, shape: Sequence[int], dtype: torch.dtype, tasks: Sequence[Callable[[], Tensor]]) -> Deferred:
        """A tensor whose parts all ranks make together, one by one, when rank 0 reads it."""
        numbers = [self.register(task) for task in tasks]

        def parts() -> Iterator[Tensor]:
            for number, task in zip(numbers, tasks, strict=True):
                self.call(number)
                yield task()

        return Deferred(shape=tuple(shape), dtype=dtype, parts=parts)

    def serve(self) -> None:
        """On the other ranks: take part in all that rank 0 asks for, until it dismisses them."""
        while (number := self._mesh.largest([-1.0])[0]) != _DISMISSED:
            self._tasks[int(number)]()

    def dismiss(self) -> None:
        """On rank 0: the others go on."""
        self._mesh.largest([_DISMISSED])
