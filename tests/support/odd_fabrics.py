"""Fabrics with faults. Processes of their own import this module."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from surogate_core.bundles import Fabric, FabricContext, FabricSpec, NoOptions
from surogate_core.errors import MachineError
from surogate_core.mesh.auto import Auto
from surogate_core.mesh.delegate import Delegate
from surogate_core.mesh.groups import GroupFabric
from surogate_core.mesh.offers import FABRICS


class Careless(GroupFabric):
    """Every collective is wrong."""

    def __init__(self, options: NoOptions, context: FabricContext):
        super().__init__(context)

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.ones(elements, dtype=dtype)

    def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
        """Every rank gets what is for rank 0."""
        super().exchange([parts[0]] * len(parts), received_NK)

    def exchange_unequal(self, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """The last element of each part is lost."""
        super().exchange_unequal([p[:-1] for p in parts], [into[:-1] for into in received])

    def gather(self, parts: Sequence[Tensor]) -> None:
        """Without the longest part."""
        length = min(part.numel() for part in parts)
        super().gather([part[:length] for part in parts])

    def add(self, values: Tensor) -> None:
        """In bf16."""
        rounded = values.bfloat16()
        super().add(rounded)
        values.copy_(rounded)

    def maximum(self, values: Tensor) -> None:
        """As floats, which loses NaN."""
        found = values.view(torch.float32).nan_to_num(0)
        super().add(found)
        values.copy_(found.view(torch.int32))

    def largest(self, values: Sequence[float]) -> list[float]:
        """The values of this rank alone, which is wrong."""
        return list(values)


class Sound(GroupFabric):
    """As the core's own between processes."""

    def __init__(self, options: NoOptions, context: FabricContext):
        super().__init__(context)


class Equal(Sound):
    """Has no exchange of unequal lengths, whatever its spec says."""

    exchange_unequal = Fabric.exchange_unequal


class Strided(Sound):
    """Its groups are of ranks that are not neighbours."""

    def within(self, size: int) -> Fabric:
        """Ranks with the same remainder."""
        found, groups = GroupFabric(self._context), self.world // size
        for first in range(groups):
            group = dist.new_group(list(range(first, self.world, groups)))
            if first == self.rank % groups:
                found._group, found.rank, found.world = group, self.rank // groups, size
        return found if size < self.world else self


class Mixed(Sound):
    """A group has the right places, and not the right ranks: 0 with 3, and 2 with 1."""

    def within(self, size: int) -> Fabric:
        if size == self.world:
            return self
        found = GroupFabric(self._context)
        for ranks in ([0, 3], [2, 1]):
            group = dist.new_group(ranks)
            if self.rank in ranks:
                found._group, found._ranks = group, ranks
                found.rank, found.world = self.rank % 2, size
        return found


class Numbered(Sound):
    """A rank of a group has the number that it has among all ranks."""

    def within(self, size: int) -> Fabric:
        found = super().within(size)
        found.rank = self.rank
        return found


class _Group(Delegate):
    def __init__(self, group: Fabric, all_ranks: Fabric):
        self._group, self._all_ranks = group, all_ranks
        self.rank, self.world = group.rank, group.world

    def _now(self) -> Fabric:
        return self._group


class Turned(Sound):
    """A group's parts go to the next rank."""

    def within(self, size: int) -> Fabric:
        return _Turned(super().within(size), self)


class _Turned(_Group):
    def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
        """Wrong."""
        super().exchange([*parts[1:], parts[0]], received_NK)


class InStep(Sound):
    """Every group waits for the others."""

    def within(self, size: int) -> Fabric:
        return _InStep(super().within(size), self)


class _InStep(_Group):
    def gather(self, parts: Sequence[Tensor]) -> None:
        """All ranks must send as much."""
        most = float(max(part.numel() for part in parts))
        if self._all_ranks.largest([most, -most]) != [most, -most]:
            raise RuntimeError("another group gathers another size")
        super().gather(parts)


class Bounded(Delegate):
    """Has no `across`, whatever its spec says."""

    across = Fabric.across

    def __init__(self, options: NoOptions, context: FabricContext):
        self._sound = Sound(options, context)
        self.rank, self.world = context.rank, context.world

    def _now(self) -> Fabric:
        return self._sound

    def connect(self) -> None:
        """As the sound one."""
        self._sound.connect()


class Aborting(Bounded):
    """As `Bounded`, and an ordinary exit of its process aborts."""

    def __init__(self, options: NoOptions, context: FabricContext):
        super().__init__(options, context)
        atexit.register(_abort)


def _abort() -> None:
    os.write(2, b"terminate called\n")
    os.abort()


class Near(Sound):
    """What should be across is within."""

    def across(self, size: int) -> Fabric:
        """The wrong ranks."""
        return self.within(self.world // size)


class Promising(Fabric):
    """Has no `within`, whatever its spec says."""

    def __init__(self, options: NoOptions, context: FabricContext):
        self.rank, self.world = context.rank, context.world


class Unplugged(GroupFabric):
    """Opens the processes' group, and finds that it is of no use."""

    def __init__(self, options: NoOptions, context: FabricContext):
        super().__init__(context)

    def connect(self) -> None:
        super().connect()
        self.close()
        raise MachineError("there is no cable")


def second_choice(options: NoOptions, context: FabricContext) -> Fabric:
    """`auto`, whose first choice cannot connect."""
    first = FabricSpec(name="unplugged", build=Unplugged, priority=99)
    return Auto(options, replace(context, offers=(first, *FABRICS)))
