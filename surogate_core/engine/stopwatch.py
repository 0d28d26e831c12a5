"""How long a rank's own work takes, without waiting for the device or for other ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

PENDING = 8
"""Most tasks that the device has not finished yet; more are not measured."""


class Stopwatch:
    """Times tasks on a device; a task's time is counted once the device has finished it."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds, self._tasks = 0.0, 0

    def time(self, work: Callable[[], object]) -> None:
        """Do the work, and measure it."""
        if not self._on_gpu:
            began = time.perf_counter()
            work()
            self._count(time.perf_counter() - began)
            return
        self._collect()
        if len(self._pending) == PENDING:
            work()
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        self._pending.append((begin, end))

    def mean(self) -> float | None:
        """Mean seconds of the tasks since the last call; None without any."""
        self._collect()
        mean = self._seconds / self._tasks if self._tasks else None
        self._seconds, self._tasks = 0.0, 0
        return mean

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            self._count(begin.elapsed_time(end) / 1e3)

    def _count(self, seconds: float) -> None:
        self._seconds += seconds
        self._tasks += 1
