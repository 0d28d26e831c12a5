"""Stores in memory-mapped files: on a GPU a thread copies tensors through pinned buffers, overlapped with the
computation.

One thread does the jobs in their order, so a read never overtakes a write. Device memory is allocated on the compute
stream and freed when no copy uses it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from surogate_core.plugin import bundles
from surogate_offload_disk.files import mapped

BUFFER = 64 * 2**20
"""Bytes of each of the two pinned buffers of a direction."""


class _Lane:
    """Copies between files and a CUDA device: a thread, a side stream and two pinned buffers."""

    def __init__(self, device: torch.device):
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="surogate-disk")
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._used: list[torch.cuda.Event | None] = [None, None]

    def read(self, rooms: Sequence[Tensor], homes: Sequence[Tensor]) -> Future[torch.cuda.Event]:
        """Fill device tensors from files, when the compute stream is done with their memory."""
        return self._thread.submit(self._copy, rooms, homes, torch.cuda.current_stream().record_event(), out=False)

    def write(self, rooms: Sequence[Tensor], homes: Sequence[Tensor]) -> Future[torch.cuda.Event]:
        """Write device tensors to files, when the compute stream has computed them; done when the event is there."""
        return self._thread.submit(self._copy, rooms, homes, torch.cuda.current_stream().record_event(), out=True)

    def _copy(
        self, rooms: Sequence[Tensor], homes: Sequence[Tensor], ready: torch.cuda.Event, *, out: bool
    ) -> torch.cuda.Event:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            pending: list[tuple[int, Tensor]] = []
            number = 0
            for room, home in zip(rooms, homes, strict=True):
                for low in range(0, home.nbytes, BUFFER):
                    there, part = room[low : low + BUFFER], home[low : low + BUFFER]
                    which, number = number % 2, number + 1
                    buffer = self._buffers[which][: part.nbytes]
                    if out:
                        if len(pending) == 2:
                            self._drain(pending)
                        buffer.copy_(there, non_blocking=True)
                        pending.append((which, part))
                    else:
                        self._wait(which)
                        buffer.copy_(part)
                        there.copy_(buffer, non_blocking=True)
                    self._used[which] = self._stream.record_event()
            while pending:
                self._drain(pending)
            return self._stream.record_event()

    def _wait(self, which: int) -> None:
        event = self._used[which]
        if event is not None:
            event.synchronize()

    def _drain(self, pending: list[tuple[int, Tensor]]) -> None:
        which, part = pending.pop(0)
        self._wait(which)
        part.copy_(self._buffers[which][: part.nbytes])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@dataclass(slots=True)
class _Here:
    """A key's tensors on the device; the event is there when they are filled."""

    tensors: tuple[Tensor, ...]
    filled: Future[torch.cuda.Event] | None


class DiskWeightStore(bundles.Store):
    """Keeps tensors in files. A tensor that is already in host memory, such as a view of such a file, stays there,
    live.
    """

    def __init__(self, device: torch.device, directory: str):
        self._device, self._directory = device, directory
        self._lane = _Lane(device) if device.type == "cuda" else None
        self._homes: dict[str, tuple[Tensor, ...]] = {}
        self._written = WeakIdKeyDictionary()
        """Tensor that was put → its file's tensor; a tied weight has only one."""
        self._on_disk = 0
        self._here: dict[str, _Here] = {}

    def put(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Write the tensors to a file, except contiguous ones on the host."""
        self._homes[key] = tuple(self._home(t) for t in tensors)

    def _home(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor
        if tensor not in self._written:
            data = mapped(tensor.nbytes, self._directory).view(tensor.dtype).view(tensor.shape)
            self._written[tensor] = data.copy_(tensor)
            self._on_disk += tensor.nbytes
        home = self._written[tensor]
        assert isinstance(home, Tensor)
        return home

    def prefetch(self, key: str) -> None:
        """Start the copies to the device."""
        if key in self._here:
            return
        homes = self._homes[key]
        if self._lane is None:
            self._here[key] = _Here(homes, None)
            return
        tensors = tuple(torch.empty(h.shape, dtype=h.dtype, device=self._device) for h in homes)
        self._here[key] = _Here(tensors, self._lane.read([*map(_bytes, tensors)], [*map(_bytes, homes)]))

    def fetch(self, key: str) -> tuple[Tensor, ...]:
        """The copies; the compute stream waits for them."""
        self.prefetch(key)
        self._join(self._here[key])
        return self._here[key].tensors

    def _join(self, here: _Here) -> None:
        if here.filled is not None:
            torch.cuda.current_stream(self._device).wait_event(here.filled.result())
            here.filled = None

    def release(self, key: str) -> None:
        """Free the device's memory."""
        here = self._here.pop(key, None)
        if here is not None:
            self._join(here)

    def nbytes(self) -> Mapping[Literal["device", "host", "disk"], int]:
        """Bytes held, by place; tensors that were already on the host are not counted."""
        on_device = sum(t.nbytes for here in self._here.values() for t in here.tensors) if self._lane else 0
        return {"device": on_device, "host": 2 * BUFFER if self._lane else 0, "disk": self._on_disk}


class DiskGradientStore(DiskWeightStore, bundles.GradientStore):
    """Gradient sums that are copied to the device for a piece's backward and back to their file after it.

    The first micro-step of an optimizer step reads none and starts from zeros.
    """

    def __init__(self, device: torch.device, directory: str):
        super().__init__(device, directory)
        self._zeros = False
        self._begun: set[int] = set()
        """Addresses of the tensors that were here in this micro-step."""
        self._leaving: list[Future[torch.cuda.Event]] = []

    def begin(self, *, first: bool, last: bool) -> None:
        """A micro-step begins."""
        self._zeros = first
        self._begun.clear()

    def prefetch(self, key: str) -> None:
        """Start the copies to the device, or make zeros there."""
        if key in self._here:
            return
        homes = self._homes[key]
        fresh = [self._zeros and home.data_ptr() not in self._begun for home in homes]
        self._begun.update(home.data_ptr() for home in homes)
        if self._lane is None:
            for home, new in zip(homes, fresh, strict=True):
                if new:
                    home.zero_()
            self._here[key] = _Here(homes, None)
            return
        tensors = tuple(torch.empty(h.shape, dtype=h.dtype, device=self._device) for h in homes)
        for tensor, new in zip(tensors, fresh, strict=True):
            if new:
                tensor.zero_()
        coming = [(t, h) for t, h, new in zip(tensors, homes, fresh, strict=True) if not new]
        filled = self._lane.read([_bytes(t) for t, _ in coming], [_bytes(h) for _, h in coming])
        self._here[key] = _Here(tensors, filled)

    def release(self, key: str) -> None:
        """Start the copies to the file, when those of the key before the last are complete."""
        here = self._here.pop(key)
        self._join(here)
        if self._lane is None:
            return
        while len(self._leaving) > 1:
            self._leaving.pop(0).result()
        homes = self._homes[key]
        self._leaving.append(self._lane.write([*map(_bytes, here.tensors)], [*map(_bytes, homes)]))

    def finish(self) -> None:
        """Wait until the sums are in their files."""
        while self._leaving:
            self._leaving.pop(0).result()


class DiskStores(bundles.Stores):
    """A run's tensors in files of one directory."""

    def __init__(self, directory: str, device: torch.device):
        self._directory, self._device = directory, device

    def store(self, kind: bundles.TensorKind) -> DiskWeightStore:
        """The store of weights or gradients."""
        return (DiskGradientStore if kind == "gradients" else DiskWeightStore)(self._device, self._directory)

    def allocate(self, kind: bundles.TensorKind, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One file twice: no GPU can address it."""
        tensor = mapped(elements * dtype.itemsize, self._directory).view(dtype)
        return tensor, tensor
