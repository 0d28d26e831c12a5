"""GPUs of a machine that write into each other's memory by copy engines, while all multiprocessors compute.

NCCL moves data by kernels. They take multiprocessors from products that fill all of them, which then need another
wave. Here each rank maps the buffers of the others (CUDA IPC) and copies into them. Flags in GPU memory say when a
buffer may be written and when it is complete; streams write and wait for them without a kernel.

On several machines, groups inside a machine work so, and NCCL moves the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surogate_core.bundles.fabrics import FabricContext
from surogate_core.errors import MachineError
from surogate_core.mesh import driver
from surogate_core.mesh.groups import GroupFabric

GRANULE = 2 * 2**20
"""Allocations are multiples of it: smaller ones are parts of a block, which a handle would name as a whole."""
CHANNELS = 64
"""Most streams that communicate."""
SMALLEST = 64 * 2**10
"""Bytes of the smallest part that is copied; NCCL moves less in one kernel. Chosen, not measured."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory of this rank that the others write to."""

    address: int
    nbytes: int
    tensor: Tensor
    peers: dict[int, int] = field(default_factory=dict)
    """Rank of this machine → address here of its buffer of the same number; empty until it is shared."""


class _Bytes:
    """GPU memory as torch takes it."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class PeerMemory:
    """Buffers that all ranks allocate alike, in the same order, and that each can write to on those of its machine."""

    def __init__(self, device: torch.device, *, rank: int, near: int, gather: Callable[[Any], list[Any]]):
        """`near`: neighbouring ranks of each machine. `gather`: `Mesh.gather`."""
        self._device, self._rank, self._gather = device, rank, gather
        self._near = range(rank - rank % near, rank - rank % near + near)
        self._buffers: list[_Buffer] = []
        self._connected = False

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated, beside torch's allocator."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        """[elements] zeros in memory that the other ranks can write to."""
        torch.cuda.init()
        torch.cuda.current_stream(self._device)
        used = elements * dtype.itemsize
        nbytes = max(-(-used // GRANULE), 1) * GRANULE
        try:
            address = driver.allocate(nbytes)
        except MachineError as error:
            torch.cuda.empty_cache()  # torch's unused memory may be enough
            try:
                address = driver.allocate(nbytes)
            except MachineError:
                raise torch.OutOfMemoryError(str(error)) from error
        whole = torch.as_tensor(_Bytes(address, nbytes), device=self._device)
        self._buffers.append(_Buffer(address, nbytes, whole))
        if self._connected:
            self.share()
        return whole[:used].view(dtype)

    def share(self) -> None:
        """Map the buffers of this machine's ranks. All ranks call it. Raises `MachineError` on all if one cannot."""
        self._connected = True
        new = [buffer for buffer in self._buffers if not buffer.peers]
        try:
            told: Any = [[driver.export(buffer.address).hex(), buffer.nbytes] for buffer in new]
        except MachineError as error:
            told = str(error)
        by_rank = self._gather(told)
        failed = told if isinstance(told, str) else ""
        if not any(isinstance(found, str) for found in by_rank):
            assert all([n for _, n in found] == [b.nbytes for b in new] for found in by_rank), "unequal buffers"
            failed = self._attach(new, by_rank)
        for rank, reason in enumerate(self._gather(failed)):
            if reason:
                raise MachineError(f"rank {rank}: {reason}")

    def _attach(self, new: Sequence[_Buffer], by_rank: Sequence[Sequence[tuple[str, int]]]) -> str:
        """Map new buffers; what went wrong, or nothing."""
        try:
            for number, buffer in enumerate(new):
                buffer.peers = {self._rank: buffer.address}
                for rank in self._near:
                    if rank != self._rank:
                        buffer.peers[rank] = driver.attach(bytes.fromhex(by_rank[rank][number][0]))
        except MachineError as error:
            return str(error)
        return ""

    def addresses(self, tensor: Tensor, ranks: Sequence[int]) -> list[int] | None:
        """The addresses here of these ranks' memory in the place of a tensor; None if it is not in such a buffer.

        `ranks`: of this machine.
        """
        address = tensor.data_ptr()
        for buffer in self._buffers:
            if buffer.peers and buffer.address <= address < buffer.address + buffer.nbytes:
                return [buffer.peers[rank] + address - buffer.address for rank in ranks]
        return None

    def close(self) -> None:
        """Unmap the others' memory. The own memory is freed with the process: others may still have it mapped."""
        for buffer in self._buffers:
            for rank, address in buffer.peers.items():
                if rank != self._rank:
                    driver.detach(address)
            buffer.peers = {}


class PeerFabric(GroupFabric):
    """`GroupFabric`, but among ranks of one machine, large exchanges and gathers whose target is in `PeerMemory` go by
    copy engines.
    """

    def __init__(self, context: FabricContext, memory: PeerMemory | None = None):
        """`memory`: that of the fabric of which this one is a group."""
        super().__init__(context)
        self._memory = memory or PeerMemory(context.device, rank=context.rank, near=context.near, gather=context.gather)
        self._flags: list[int] | None = None
        """Addresses of each rank's; None among ranks of several machines."""
        self._channels: dict[int, int] = {}
        """Stream → its flags. All ranks use streams in the same order."""

    def connect(self) -> None:
        """As `Fabric.connect`. Raises `MachineError` if the GPUs cannot write into each other's memory."""
        super().connect()
        try:
            self._memory.share()
            self._opened()
        except MachineError as error:
            self.close()
            raise MachineError(f"the GPUs cannot write into each other's memory: {error}") from None

    def _empty(self) -> PeerFabric:
        """As in `GroupFabric`."""
        return PeerFabric(self._context, self._memory)

    def _opened(self) -> None:
        """As in `GroupFabric`. The flags of groups of which each is inside a machine."""
        near = self._context.near
        # All ranks of the run decide alike, and so allocate alike.
        if all(ranks[0] // near == ranks[-1] // near for ranks in self._family):
            flags = self._memory.zeros(CHANNELS * 2 * self.world, torch.int32)
            self._flags = self._memory.addresses(flags, self._ranks)

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """As `Fabric.zeros`."""
        return self._memory.zeros(elements, dtype)

    @property
    def memory(self) -> int:
        """As `Fabric.memory`."""
        return self._memory.nbytes

    def close(self) -> None:
        """As `Fabric.close`."""
        self._memory.close()
        super().close()

    def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
        """As `Fabric.exchange`."""
        rooms = self._rooms(received_NK)
        if rooms is None or received_NK[0].nbytes < SMALLEST:
            super().exchange(parts, received_NK)
            return
        row = received_NK[0].nbytes
        self._copy([(r, rooms[r] + self.rank * row, part) for r, part in enumerate(parts)])

    def gather(self, parts: Sequence[Tensor]) -> None:
        """As `Fabric.gather`."""
        own = parts[self.rank]
        largest = max(parts, key=lambda part: part.numel())
        # The longest part decides: all ranks take the same way.
        if largest.nbytes < SMALLEST or self._rooms(largest) is None:
            super().gather(parts)
            return
        rooms = self._rooms(own) if own.numel() else None
        self._copy([(r, rooms[r], own) for r in range(self.world)] if rooms is not None else [])

    def _rooms(self, tensor: Tensor) -> list[int] | None:
        """The addresses of each rank's memory in the place of a tensor; None if they cannot be written to."""
        return None if self._flags is None else self._memory.addresses(tensor, self._ranks)

    def _copy(self, copies: Sequence[tuple[int, int, Tensor]]) -> None:
        """(rank, address, values): write values into the others' memory; begins and ends on all ranks together."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._meet(stream, 0)
        # Each rank begins with its neighbour, so that no GPU receives from all at once.
        for rank, address, values in sorted(copies, key=lambda c: (c[0] - self.rank) % self.world):
            if rank != self.rank:
                driver.copy(address, values.data_ptr(), values.nbytes, stream)
        self._meet(stream, 1)

    def _meet(self, stream: int, which: int) -> None:
        """The stream goes on when the streams of all ranks have come here."""
        assert self._flags is not None
        channel = self._channels.setdefault(stream, len(self._channels))
        assert channel < CHANNELS, "too many streams communicate"
        base = 4 * (2 * channel + which) * self.world
        others = [rank for rank in range(self.world) if rank != self.rank]
        for rank in others:
            driver.write_flag(self._flags[rank] + base + 4 * self.rank, 1, stream)
        for rank in others:
            mine = self._flags[self.rank] + base + 4 * rank
            driver.wait_flag(mine, 1, stream)
            driver.write_flag(mine, 0, stream)
