"""Ranks that are threads of one process: the reference of every fabric, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from surogate_core.plugin import bundles
from surogate_core.service.engine import Mesh

T = TypeVar("T")


class VirtualRanks:
    """What the ranks of one process share."""

    def __init__(self, world: int):
        self.world = world
        self.barrier = threading.Barrier(world)
        self.slots: list[Any] = [None] * world
        self.turn = threading.Lock()
        self._groups: dict[tuple[str, int], list[VirtualRanks]] = {}

    def swap(self, rank: int, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found

    def abort(self) -> None:
        """A rank has failed: the others do not wait for it."""
        self.barrier.abort()
        for group in (g for groups in self._groups.values() for g in groups):
            group.abort()

    def groups(self, which: str, size: int) -> list[VirtualRanks]:
        """What each group of `size` ranks shares. `which`: names the division into groups."""
        with self.turn:
            return self._groups.setdefault((which, size), [VirtualRanks(size) for _ in range(self.world // size)])


class VirtualFabric(bundles.Fabric):
    """The fabric of one virtual rank."""

    def __init__(self, ranks: VirtualRanks, rank: int):
        self._ranks = ranks
        self.rank, self.world = rank, ranks.world

    def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
        """As `Fabric.exchange`."""
        self.exchange_unequal(parts, received_NK.unbind())

    def exchange_unequal(self, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """As `Fabric.exchange_unequal`."""
        sent = self._ranks.swap(self.rank, [part.clone() for part in parts])
        for into, theirs in zip(received, sent, strict=True):
            assert into.numel() == theirs[self.rank].numel(), "two ranks disagree about a length"
            into.copy_(theirs[self.rank])

    def gather(self, parts: Sequence[Tensor]) -> None:
        """As `Fabric.gather`."""
        found = self._ranks.swap(self.rank, parts[self.rank].clone())
        for part, theirs in zip(parts, found, strict=True):
            part.copy_(theirs)

    def add(self, values: Tensor) -> None:
        """As `Fabric.add`."""
        found = self._ranks.swap(self.rank, values.clone())
        values.copy_(torch.stack(found).sum(0))

    def maximum(self, values: Tensor) -> None:
        """As `Fabric.maximum`."""
        found = self._ranks.swap(self.rank, values.clone())
        values.copy_(torch.stack(found).amax(0))

    def largest(self, values: Sequence[float]) -> list[float]:
        """As `Fabric.largest`."""
        return [max(column) for column in zip(*self._ranks.swap(self.rank, list(values)), strict=True)]

    def within(self, size: int) -> bundles.Fabric:
        """As `Fabric.within`."""
        group, rank = divmod(self.rank, size)
        return VirtualFabric(self._ranks.groups("within", size)[group], rank)

    def across(self, size: int) -> bundles.Fabric:
        """As `Fabric.across`."""
        rank, group = divmod(self.rank, size)
        return VirtualFabric(self._ranks.groups("across", self.world // size)[group], rank)

    def mesh(self, node: int = 0) -> Mesh:
        """The rank as an engine takes it. `node`: `Mesh.node`."""
        return Mesh(
            rank=self.rank,
            world=self.world,
            node=node,
            fabric=self,
            swap=lambda value: self._ranks.swap(self.rank, value),
            turn=self._ranks.turn,
        )


def in_threads(world: int, work: Callable[[VirtualFabric], T]) -> list[T]:
    """The results of `work` on every rank of a virtual world; the first error is raised."""
    ranks = VirtualRanks(world)

    def one(rank: int) -> T:
        try:
            return work(VirtualFabric(ranks, rank))
        except BaseException:
            ranks.abort()
            raise

    with ThreadPoolExecutor(max_workers=world) as pool:
        futures = [pool.submit(one, rank) for rank in range(world)]
    errors = [error for f in futures if (error := f.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [f.result() for f in futures]
