"""The micro-batches of steps: made while the step before runs, or after it where they are sampled from the model."""

from __future__ import annotations

from collections.abc import Container
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from surogate_core.batch import BatchCounts, MicroBatch
from surogate_core.bundles import Steps
from surogate_core.bundles.tasks import is_online, next_share
from surogate_core.engine.engine import Engine
from surogate_core.train.flops import ModelFlops


@dataclass(frozen=True, slots=True)
class Made:
    """A step's micro-batches, the loader's epoch after them, and the FLOPs of the step on all ranks."""

    batches: list[MicroBatch | BatchCounts]
    """`BatchCounts` where another rank runs the micro-batch."""
    epoch: float
    flops: float


class Batches:
    """Makes a step's micro-batches when they are taken.

    For a GPU they are in page-locked memory, so that the thread which launches kernels does not copy them there.
    """

    def __init__(self, loader: Steps, work: ModelFlops, device: torch.device, *, own: Container[int] | None = None):
        """`own`: numbers of the micro-batches that this rank runs; None is all."""
        self._loader, self._work, self._pins, self._own = loader, work, device.type == "cuda", own

    @staticmethod
    def of(engine: Engine, loader: Steps, work: ModelFlops) -> Batches:
        """For the share of the engine's rank."""
        settings, axes = engine.settings, engine.settings.axes
        own = None if axes.ranks == 1 or axes.varying else engine.sharing.share(axes.micro_batches).numbers
        kind = Batches if is_online(loader) else Prefetcher
        return kind(loader, work, settings.device, own=own)

    @property
    def state(self) -> dict[str, Any]:
        """The loader's. Read it to save it only: it may wait for what is made beside the step."""
        return self._loader.state()

    def take(self) -> Made:
        """The next step's micro-batches; what went wrong in making them is raised here."""
        batches: list[MicroBatch | BatchCounts] = []
        batches += self._loader.next_step() if self._own is None else next_share(self._loader, self._own)
        if self._pins:
            batches = [batch.pinned() if isinstance(batch, MicroBatch) else batch for batch in batches]
        return Made(batches, self._loader.epoch, self._work.step(batches))

    def close(self) -> None:
        """End what the steps hold, such as processes: nothing reads the data after the run."""
        if (end := getattr(self._loader, "close", None)) is not None:
            end()


class Prefetcher(Batches):
    """Makes the next step's micro-batches in a thread."""

    def __init__(self, loader: Steps, work: ModelFlops, device: torch.device, *, own: Container[int] | None = None):
        super().__init__(loader, work, device, own=own)
        self._state = loader.state()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="surogate-batches")
        self._next: Future[tuple[Made, dict[str, Any]]] = self._pool.submit(self._make_ahead)

    @property
    def state(self) -> dict[str, Any]:
        """The loader's as of what was taken."""
        return self._state

    def _make_ahead(self) -> tuple[Made, dict[str, Any]]:
        return super().take(), self._loader.state()

    def take(self) -> Made:
        """The next step's micro-batches; what went wrong in making them is raised here."""
        made, self._state = self._next.result()
        self._next = self._pool.submit(self._make_ahead)
        return made

    def close(self) -> None:
        """Wait for the thread: nothing reads the data after the run."""
        self._pool.shutdown(wait=True, cancel_futures=True)
