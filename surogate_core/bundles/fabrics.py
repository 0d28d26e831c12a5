"""Fabrics: collectives among the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_core.bundles.options import NoOptions

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor


class Fabric:
    """The collectives of one rank, on tensors of its compute device; what `FabricSpec.build` returns.

    All ranks call the same ones in the same order, with equal dtypes and, except for `exchange_unequal`, equal shapes.
    Each runs in the order of the current stream, and a CUDA graph can capture it once it has run outside of a graph
    with the same sizes.
    """

    rank: int
    """Number of this rank."""
    world: int
    """Number of ranks, N."""
    note: str = ""
    """What the user should know of the connection, in one sentence; empty if nothing."""

    def connect(self) -> None:
        """Open the communication. All ranks call it before the first collective, when all of them are there.

        Raises `MachineError` on every rank if one of them cannot; nothing is open then.
        """

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """[elements] zeros in memory of the compute device that the fabric moves faster than other memory.

        None if it has no such memory. All ranks allocate alike, in the same order, before and after `connect`. Not
        every tensor of a collective is in such memory.
        """
        return None

    @property
    def memory(self) -> int:
        """Bytes on the compute device that `zeros` allocated beside torch's allocator."""
        return 0

    def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
        """Send `parts[r]`, [K] each, to every rank r; `received_NK[r]` becomes what rank r sent here.

        What is in this rank's own row is undefined.
        """
        raise NotImplementedError

    def exchange_unequal(self, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send `parts[r]`, 1-D and contiguous, to every rank r; `received[r]` becomes what rank r sent here.

        Any length may be 0. `parts[r]` has the length of `received[this rank]` on rank r: both ranks know it, others
        need not. What is in this rank's own part of `received` is undefined. Needs `FabricSpec.unequal`.
        """
        raise NotImplementedError

    def gather(self, parts: Sequence[Tensor]) -> None:
        """Fill `parts[r]` with the values that rank r has there, for all r. Lengths may differ, and may be 0."""
        raise NotImplementedError

    def add(self, values: Tensor) -> None:
        """Add the ranks' values in place: fp32 or fp64, of any shape.

        At most one rank's value of an element is not zero, so the sum has no order.
        """
        raise NotImplementedError

    def maximum(self, values: Tensor) -> None:
        """Take the maximum over the ranks in place: int32, of any shape."""
        raise NotImplementedError

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maximum of each number over the ranks, on the host."""
        raise NotImplementedError

    def within(self, size: int) -> Fabric:
        """The collectives among `size` neighbouring ranks, of which this one is: ranks 0 … size − 1 are a group, and so
        on. `size` divides the ranks.

        All ranks call it after `connect`, if `FabricSpec.groups` is set. Groups do not wait for each other. It lives as
        long as this fabric.
        """
        raise NotImplementedError

    def across(self, size: int) -> Fabric:
        """The collectives among the ranks whose number is this one's modulo `size`: ranks 0, `size`, 2 · `size` … are a
        group, and so on. `size` divides the ranks.

        All ranks call it after `connect`, if `FabricSpec.across` is set; on a fabric of `within`, all ranks of all its
        groups. Groups do not wait for each other. It lives as long as this fabric.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the communication, if `connect` opened it. All graphs that captured it are gone by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricContext:
    """What a fabric of one rank is built from."""

    rank: int
    """Number of this rank."""
    world: int
    """Number of ranks, at least 2."""
    near: int
    """Ranks on each machine, if all machines have equally many and they are neighbours: machine i has the ranks from
    i · near on. N on one machine, otherwise 0. All ranks have the same number here."""
    device: torch.device
    """The compute device of this rank."""
    store: dist.Store
    """A key-value store of the ranks, in which all keys are the fabric's own."""
    gather: Callable[[Any], list[Any]]
    """A JSON value of this rank → the values of all ranks, by rank. All ranks call it in the same order."""
    offers: Sequence[FabricSpec] = ()
    """All fabrics of the run's plugins, for one that chooses among them."""


def _anywhere(device_type: str, near: int, world: int) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricSpec:
    """A fabric: moves data among the ranks of a run."""

    name: str
    """The value of `fabric`."""
    build: Callable[[Any, FabricContext], Fabric]
    """(options, what it is built from) → the fabric of this rank, which opens nothing before `connect`. Called in runs
    of several ranks only."""
    supports: Callable[[str, int, int], bool] = _anywhere
    """(`cuda` or `cpu`, ranks of each machine as in `FabricContext.near`, number of all ranks) → whether it can connect
    such ranks."""
    priority: int | None = None
    """`fabric=auto` takes the highest priority that supports the ranks and connects: copy_engines has 20, nccl and gloo
    10. None: only its name chooses it."""
    groups: bool = False
    """Whether its fabrics have `within`, which `context_parallel_size` needs."""
    across: bool = False
    """Whether its fabrics, and the fabrics of `within`, have `across`. Without it, sums on several machines treat all
    ranks alike, and `dp_shard_size` is refused."""
    unequal: bool = False
    """Whether its fabrics, and their groups, have `exchange_unequal`. No feature of the core needs it yet."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
