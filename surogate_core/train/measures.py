"""What the loop measures and reports beside the training itself."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from surogate_core.engine.engine import Engine
from surogate_core.events import Event, Progress
from surogate_core.imports import program_keeps_objects

SPEED_SMOOTHING = 0.1
"""Weight of the newest step in the moving average that the ETA is made from."""


@dataclass(slots=True)
class Clock:
    """Time of steps, without evaluations and saves."""

    mark: float = field(default_factory=time.perf_counter)
    average: float | None = None

    def lap(self) -> float:
        """Seconds since the mark, which moves here."""
        now = time.perf_counter()
        seconds, self.mark = max(now - self.mark, 1e-9), now
        self.average = (
            seconds if self.average is None else (1 - SPEED_SMOOTHING) * self.average + SPEED_SMOOTHING * seconds
        )
        return seconds

    def restart(self) -> None:
        """Do not count what has passed since the mark."""
        self.mark = time.perf_counter()


class Mebibytes:
    """Progress in MiB, at most one event per mebibyte."""

    def __init__(self, emit: Callable[[Event], object], task: str):
        self._emit, self._task, self._done, self._total = emit, task, 0, 1
        self._tell(0)

    def told(self, done: int, total: int) -> None:
        """Report `done` bytes; only `over` reports the end."""
        self._total = max(1, -(-total // 2**20))
        if self._done < done // 2**20 < self._total:
            self._tell(done // 2**20)

    def over(self) -> None:
        """Report the end."""
        self._tell(self._total)

    def _tell(self, done: int) -> None:
        self._done = done
        self._emit(Progress(task=self._task, done=done, total=self._total, unit="MiB"))


@contextmanager
def settled_objects() -> Iterator[None]:
    """Take the objects that exist before the loop out of the garbage collector's passes.

    A pass over everything that torch and transformers made takes 0.1 s and more, which is several steps of a GPU. A
    program that has done so itself is left alone.
    """
    if program_keeps_objects():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def peak_memory(engine: Engine) -> int:
    """Bytes: on CUDA torch's peak and the buffers that other GPUs write to; elsewhere the peak resident set."""
    if engine.settings.device.type == "cuda":
        return torch.cuda.max_memory_allocated(engine.settings.device) + engine.mesh.memory
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that is not finite; a NaN is an extreme too."""
    return next((name for name, tensor in tensors if not all(x.isfinite() for x in torch.aminmax(tensor))), None)
