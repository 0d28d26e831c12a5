"""Copies beside the computation: side streams, and tensors as the bytes of their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

FIRST = -1
"""Priority of the streams with collectives: one that waits for a product holds up all ranks."""


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a contiguous range of memory, each once, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class SideStream:
    """A stream that forks from the compute stream and joins it by events only, so that a CUDA graph captures its work.

    On a CPU nothing is asynchronous. A stream of a lower `priority` is served first.
    """

    def __init__(self, device: torch.device, *, priority: int = 0):
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        """Launch on the side stream, after everything launched so far."""
        with self.after(self.fork()):
            yield

    def fork(self) -> torch.cuda.Event | None:
        """An event after everything launched so far on the compute stream."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Launch on the side stream, after an event of the compute stream."""
        if self._stream is None or event is None:
            yield
            return
        self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def done(self) -> torch.cuda.Event | None:
        """An event after everything launched here so far."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, event: torch.cuda.Event | None) -> None:
        """Let the compute stream wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
