"""Stores in pinned host memory: copies run on side streams, overlapped with the computation.

All device memory is allocated and freed on the compute stream, after it has waited for the copies. So the allocator's
order is right without `record_stream`, and a CUDA graph can capture everything. Streams fork from the compute stream
and join it by events only; host buffers are made once and never move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from surogate_core.plugin import SideStream, bundles, flat_bytes, is_dense
from surogate_offload_host.memory import HostBlock

_ALIGNMENT = 256
"""Alignment in bytes of a tensor in a buffer."""
_PADDING = bundles.FLAT_ALIGNMENT * 4
"""Largest gap in bytes between tensors that are copied as one."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Adjacent tensors of one host storage; they are copied as one, and are adjacent on the device too."""

    home: Tensor
    """[n] uint8 on the host."""
    members: tuple[tuple[int, int], ...]
    """(place among the key's tensors, offset in bytes)."""


def _address(tensor: Tensor) -> int:
    """Address of its first element; of an empty tensor, the address that it would have."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize


def _stretches(homes: Sequence[Tensor]) -> tuple[_Stretch, ...]:
    """The contiguous ranges that the host tensors form, each tensor in one."""
    ordered = sorted(range(len(homes)), key=lambda i: _address(homes[i]))
    runs: list[list[int]] = []
    for i in ordered:
        last = homes[runs[-1][-1]] if runs else None
        if last is not None and _near(last, homes[i]):
            runs[-1].append(i)
        else:
            runs.append([i])
    found = []
    for run in runs:
        start = _address(homes[run[0]])
        storage = homes[run[0]].untyped_storage()
        length = _address(homes[run[-1]]) + homes[run[-1]].nbytes - start
        whole = torch.empty(0, dtype=torch.uint8).set_(storage, start - storage.data_ptr(), (length,), (1,))
        found.append(_Stretch(whole, tuple((i, _address(homes[i]) - start) for i in run)))
    return tuple(found)


def _near(above: Tensor, below: Tensor) -> bool:
    """Whether one begins where the other ends, except for the alignment gap."""
    if above.untyped_storage().data_ptr() != below.untyped_storage().data_ptr() or not above.nbytes:
        return False
    return 0 <= _address(below) - _address(above) - above.nbytes <= _PADDING


@dataclass(slots=True)
class _Copies:
    """Tensors on the device that a side stream reads or writes until the mark; None once that was waited for."""

    tensors: tuple[Tensor, ...]
    mark: torch.cuda.Event | None


class HostWeightStore(bundles.Store):
    """Keeps tensors in host memory, and copies them to the device for each use."""

    def __init__(self, device: torch.device):
        self._device = device
        self._homes: dict[str, tuple[Tensor, ...]] = {}
        """Host tensors by key, with the strides of the device's."""
        self._stretches: dict[str, tuple[_Stretch, ...]] = {}
        self._locked = WeakIdKeyDictionary()
        """Tensor that was put → its host tensor; a tied weight has only one."""
        self._blocks: list[HostBlock] = []
        self._in = SideStream(device)
        self._here: dict[str, _Copies] = {}

    def put(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors to the host; those that are in (locked) host memory stay where they are, live."""
        self._rest(key, tuple(self._home(t) for t in tensors))

    def _rest(self, key: str, homes: tuple[Tensor, ...]) -> None:
        self._homes[key] = homes
        self._stretches[key] = _stretches(homes)

    def _home(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and is_dense(tensor) and (self._device.type == "cpu" or tensor.is_pinned()):
            return tensor
        if tensor not in self._locked:
            dense = tensor if is_dense(tensor) else tensor.contiguous()
            block = HostBlock(dense.nbytes, self._device)
            block.on_host.copy_(flat_bytes(dense))
            self._blocks.append(block)
            self._locked[tensor] = block.on_host.view(dense.dtype).as_strided(dense.shape, dense.stride())
        home = self._locked[tensor]
        assert isinstance(home, Tensor)
        return home

    def prefetch(self, key: str) -> None:
        """Start the copies to the device."""
        if key in self._here:
            return
        tensors, rooms = self._rooms(key)
        with self._in.after_compute():
            for stretch, room in zip(self._stretches[key], rooms, strict=True):
                room.copy_(stretch.home, non_blocking=True)
        self._here[key] = _Copies(tensors, self._in.done())

    def _rooms(self, key: str) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """(the key's uninitialised tensors on the device; the buffers that they are views of, one per range)."""
        tensors: dict[int, Tensor] = {}
        rooms = []
        for stretch in self._stretches[key]:
            room = torch.empty_like(stretch.home, device=self._device)
            rooms.append(room)
            for i, offset in stretch.members:
                home = self._homes[key][i]
                part = room[offset : offset + home.nbytes].view(home.dtype)
                tensors[i] = part.as_strided(home.shape, home.stride())
        return tuple(tensors[i] for i in range(len(tensors))), rooms

    def fetch(self, key: str) -> tuple[Tensor, ...]:
        """The copies, when they are complete."""
        self.prefetch(key)
        copies = self._here[key]
        self._in.join(copies.mark)
        copies.mark = None
        return copies.tensors

    def release(self, key: str) -> None:
        """Free the device's memory."""
        copies = self._here.pop(key, None)
        if copies is not None:
            self._in.join(copies.mark)

    def nbytes(self) -> Mapping[Literal["device", "host", "disk"], int]:
        """Bytes held, by place; tensors that were in host memory already are not counted."""
        device = sum(t.nbytes for copies in self._here.values() for t in copies.tensors)
        return {"device": device, "host": sum(b.on_host.nbytes for b in self._blocks), "disk": 0}


class ResidualStore(HostWeightStore):
    """Copies tensors out when they are put and back for the backward; at most two keys are being copied out.

    The last key that was put is still on the device when it is fetched, and is not copied back. Tensors that do not
    fill their memory (broadcast ones) stay on the device.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._out = SideStream(device)
        self._layouts: dict[str, list[tuple[torch.Size, tuple[int, ...], torch.dtype]]] = {}
        self._staying: dict[str, dict[int, Tensor]] = {}
        self._leaving: tuple[str, _Copies] | None = None

    def put(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Start the copies to the host, and forget the tensors whose copies were started before."""
        if self._leaving is not None:
            self._out.join(self._leaving[1].mark)
        dense = [t for t in tensors if is_dense(t)]
        self._staying[key] = {i: t for i, t in enumerate(tensors) if not is_dense(t)}
        layout = [(t.shape, t.stride(), t.dtype) for t in dense]
        if self._layouts.get(key) != layout:
            self._layouts[key] = layout
            self._rest(key, self._buffers(dense))
        with self._out.after_compute():
            for tensor, home in zip(dense, self._homes[key], strict=True):
                flat_bytes(home).copy_(flat_bytes(tensor), non_blocking=True)
        self._leaving = key, _Copies(tuple(dense), self._out.done())

    def _buffers(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """A buffer for the tensors, in one allocation."""
        sizes = [-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors]
        block = HostBlock(sum(sizes), self._device)
        self._blocks.append(block)
        rooms = block.on_host.split(sizes)
        return tuple(
            room[: t.nbytes].view(t.dtype).as_strided(t.shape, t.stride())
            for room, t in zip(rooms, tensors, strict=True)
        )

    def prefetch(self, key: str) -> None:
        """Start the copies to the device, unless the tensors are still there."""
        if self._leaving is not None and self._leaving[0] == key:
            self._here[key] = self._leaving[1]
            self._leaving = None
        else:
            super().prefetch(key)

    def fetch(self, key: str) -> tuple[Tensor, ...]:
        """The key's tensors, in the order in which they were put."""
        staying = self._staying[key]
        found = list(super().fetch(key))
        for place, tensor in sorted(staying.items()):
            found.insert(place, tensor)
        return tuple(found)

    def release(self, key: str) -> None:
        """Forget the tensors."""
        super().release(key)
        self._staying.pop(key, None)

    def nbytes(self) -> Mapping[Literal["device", "host", "disk"], int]:
        """Bytes held, by place; tensors that stay, or that are being copied out, count on the device too."""
        leaving = sum(t.nbytes for t in self._leaving[1].tensors) if self._leaving is not None else 0
        staying = sum(t.untyped_storage().nbytes() for tensors in self._staying.values() for t in tensors.values())
        places = super().nbytes()
        return {**places, "device": places["device"] + leaving + staying}


class HostGradientStore(HostWeightStore, bundles.GradientStore):
    """Gradient sums that are copied to the device for a piece's backward and back after it; at most one key is being
    copied out.

    The first micro-step of an optimizer step copies none and starts from zeros.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._out = SideStream(device)
        self._leaving: _Copies | None = None
        self._rooms_here: dict[str, list[Tensor]] = {}
        self._zeros = False
        self._begun: set[int] = set()
        """Addresses of the tensors that were here in this micro-step."""

    def begin(self, *, first: bool, last: bool) -> None:
        """A micro-step begins."""
        self._zeros = first
        self._begun.clear()

    def prefetch(self, key: str) -> None:
        """Start the copies to the device, or make zeros there."""
        if key in self._here:
            return
        homes = self._homes[key]
        begun = [home.data_ptr() in self._begun for home in homes]
        if any(begun):
            self._settle()  # a tied tensor may be in the middle of its copy to the host
        tensors, rooms = self._rooms(key)
        self._rooms_here[key] = rooms
        coming = []
        for stretch, room in zip(self._stretches[key], rooms, strict=True):
            if not self._zeros or any(begun[i] for i, _ in stretch.members):
                coming.append((stretch, room))
            else:
                room.zero_()
        with self._in.after_compute():
            for stretch, room in coming:
                room.copy_(stretch.home, non_blocking=True)
                for i, _ in stretch.members:
                    if self._zeros and not begun[i]:
                        tensors[i].zero_()
        self._here[key] = _Copies(tensors, self._in.done())
        self._begun.update(home.data_ptr() for home in homes)

    def release(self, key: str) -> None:
        """Start the copies to the host, when those of the key before are complete."""
        copies = self._here.pop(key)
        self._in.join(copies.mark)
        self._settle()
        with self._out.after_compute():
            for stretch, room in zip(self._stretches[key], self._rooms_here.pop(key), strict=True):
                stretch.home.copy_(room, non_blocking=True)
        self._leaving = _Copies(copies.tensors, self._out.done())

    def nbytes(self) -> Mapping[Literal["device", "host", "disk"], int]:
        """Bytes held, by place; tensors that are being copied out count on the device too."""
        leaving = sum(t.nbytes for t in self._leaving.tensors) if self._leaving is not None else 0
        places = super().nbytes()
        return {**places, "device": places["device"] + leaving}

    def finish(self) -> None:
        """The sums are on the host for all that the compute stream is given from here on."""
        self._settle()

    def _settle(self) -> None:
        if self._leaving is not None:
            self._out.join(self._leaving.mark)
            self._leaving = None


class HostStores(bundles.Stores):
    """A run's tensors in the memory of the host."""

    def __init__(self, device: torch.device):
        self._device = device

    def store(self, kind: bundles.TensorKind) -> HostWeightStore:
        """The store of weights, residuals or gradients."""
        stores = {"residuals": ResidualStore, "gradients": HostGradientStore}
        return stores.get(kind, HostWeightStore)(self._device)

    def allocate(self, kind: bundles.TensorKind, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One block of host memory, as the device and as the CPU address it."""
        block = HostBlock(elements * dtype.itemsize, self._device)
        return block.on_device.view(dtype), block.on_host.view(dtype)
