"""Ranks that are processes: collectives by torch.distributed, gloo between CPUs and NCCL between GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from surogate_core.bundles.fabrics import Fabric, FabricContext

PATIENCE = timedelta(days=7)
"""Time-out of every wait. The supervisor, not a clock, ends a run whose rank died: others may wait for a disk."""


class GroupFabric(Fabric):
    """The fabric over the default process group."""

    def __init__(self, context: FabricContext):
        self._context, self._device = context, context.device
        self.rank, self.world = context.rank, context.world
        self._open = False
        self._group: dist.ProcessGroup | None = None
        """Its ranks; None is all ranks of the run."""
        self._family = [list(range(self.world))]
        """The ranks in the run of this group, and of all that were opened with it."""
        self._ranks = self._family[0]
        """The ranks in the run of this group."""

    def connect(self) -> None:
        """As `Fabric.connect`: gloo for tensors of the CPU, and NCCL for those of the GPU."""
        gpu = self._device.type == "cuda"
        if gpu:
            # NCCL would register the buffers of captured collectives, each as one allocation. torch's expandable
            # segments consist of many, and replays would hang (pytorch issue 158029).
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=self._context.store,
            rank=self.rank,
            world_size=self.world,
            timeout=PATIENCE,
            # Explicit: torch would guess the device from the rank, and each rank's own GPU is its first.
            device_id=self._device if gpu else None,
        )
        self._open = True
        _greet(self._device)

    def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
        """As `Fabric.exchange`."""
        if self._device.type == "cpu":
            dist.all_to_all_single(received_NK, torch.stack(list(parts)), group=self._group)
        else:
            self.exchange_unequal(parts, received_NK.unbind())

    def exchange_unequal(self, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """As `Fabric.exchange_unequal`."""
        if self._device.type == "cuda":
            dist.all_to_all(list(received), list(parts), group=self._group)
            return
        # gloo exchanges parts of one tensor alone.
        lengths, sent = [part.numel() for part in received], torch.cat(list(parts))
        found = sent.new_empty(sum(lengths))
        dist.all_to_all_single(found, sent, lengths, [part.numel() for part in parts], group=self._group)
        for into, values in zip(received, found.split(lengths), strict=True):
            into.copy_(values)

    def gather(self, parts: Sequence[Tensor]) -> None:
        """As `Fabric.gather`."""
        whole = _as_one(parts)
        if self._device.type == "cuda" and whole is not None:
            dist.all_gather_into_tensor(whole, parts[self.rank], group=self._group)
            return
        # gloo cannot gather unequal lengths, and NCCL gathers them by broadcasts too.
        for rank, part in enumerate(parts):
            if part.numel():
                dist.broadcast(part, src=self._ranks[rank], group=self._group)

    def add(self, values: Tensor) -> None:
        """As `Fabric.add`."""
        dist.all_reduce(values, group=self._group)

    def maximum(self, values: Tensor) -> None:
        """As `Fabric.maximum`."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)

    def largest(self, values: Sequence[float]) -> list[float]:
        """As `Fabric.largest`, by gloo."""
        together = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self._group)
        found: list[float] = together.tolist()
        return found

    def within(self, size: int) -> Fabric:
        """As `Fabric.within`, by a process group. What was opened ends with the default group."""
        return self._divided([ranks[at : at + size] for ranks in self._family for at in range(0, self.world, size)])

    def across(self, size: int) -> Fabric:
        """As `Fabric.across`, by a process group."""
        return self._divided([ranks[number::size] for ranks in self._family for number in range(size)])

    def _divided(self, family: list[list[int]]) -> Fabric:
        """The group of this rank among those into which all ranks of the run are divided."""
        if family == self._family:
            return self
        found, own = self._empty(), self._context.rank
        found._family = family
        for ranks in family:
            # All ranks take part in making every group.
            group = dist.new_group(ranks, timeout=PATIENCE)
            if own in ranks:
                found._group, found._ranks = group, ranks
                found.rank, found.world = ranks.index(own), len(ranks)
        # The first collective of a group opens its links, which no CUDA graph can capture.
        found.largest([0.0])
        if self._device.type == "cuda":
            found.add(torch.ones(1, device=self._device))
        found._opened()
        return found

    def _empty(self) -> GroupFabric:
        """A fabric of the same kind, for a group."""
        return GroupFabric(self._context)

    def _opened(self) -> None:
        """What this kind of fabric needs once its ranks are connected. All ranks of the run call it."""

    def close(self) -> None:
        """As `Fabric.close`."""
        if self._open and dist.is_initialized():
            dist.destroy_process_group()
        self._open = False


def _greet(device: torch.device) -> None:
    """A first collective, so that broken links hang or fail here, where nothing else is under way."""
    dist.all_reduce(torch.ones(1))
    if device.type == "cuda":
        dist.all_reduce(torch.ones(1, device=device))
        torch.cuda.synchronize(device)


def _as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """The parts as one tensor if they have equal lengths and are contiguous, one after another in one storage."""
    first = parts[0]
    storage = first.untyped_storage().data_ptr()
    for number, part in enumerate(parts):
        # Two allocations may lie one after the other too, but no tensor spans them.
        adjacent = part.data_ptr() == first.data_ptr() + number * first.nbytes
        adjacent = adjacent and part.untyped_storage().data_ptr() == storage
        if part.numel() != first.numel() or not adjacent or not part.is_contiguous():
            return None
    return first.as_strided((len(parts) * first.numel(),), (1,), first.storage_offset())
