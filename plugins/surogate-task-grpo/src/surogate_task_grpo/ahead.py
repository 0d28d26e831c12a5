"""A generation that is made in a thread, while the model is trained on the generation before."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from surogate_core.plugin import events
from surogate_task_grpo.packing import Batch
from surogate_task_grpo.rollout import Generation


class Ahead:
    """At most one generation that is being made, or is made and not taken yet."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._pending: Future[Generation] | None = None
        self.step = 0
        """The first optimizer step that trains on it."""
        self.closed = False

    @property
    def begun(self) -> bool:
        """Whether there is one."""
        return self._pending is not None

    def begin(self, make: Callable[[], Generation], step: int) -> None:
        """Make a generation in the thread."""
        assert self._pending is None
        self.step = step
        self._pending = self._threads.submit(make)

    def take(self) -> tuple[Generation, float]:
        """The generation when it is there, and the seconds of waiting for it. Raises what making it raised."""
        assert self._pending is not None
        began = time.perf_counter()
        try:
            return self._pending.result(), time.perf_counter() - began
        finally:
            self._pending = None

    def close(self) -> None:
        """Want nothing more. A generation that is being made ends with its next token."""
        self.closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSteps:
    """What a generation leaves to train on and to show."""

    batch: Batch
    figures: events.Rollouts
    samples: events.RolloutSamples
    drawn: int
    """Prompts of the run up to this generation."""

    def state(self) -> dict[str, Any]:
        """It as JSON values: it cannot be made again, because the weights that sampled it are gone."""
        return {
            "batch": self.batch.state(),
            "figures": asdict(self.figures),
            "samples": [asdict(sample) for sample in self.samples.samples],
            "drawn": self.drawn,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> GeneratedSteps:
        """The one whose state this is."""
        figures = {name: _spread(value) for name, value in state["figures"].items()}
        figures["rewards"] = {name: _spread(value) for name, value in figures["rewards"].items()}
        shown = tuple(events.RolloutSample(**sample) for sample in state["samples"])
        return cls(
            batch=Batch.of(state["batch"]),
            figures=events.Rollouts(**figures),
            samples=events.RolloutSamples(step=figures["step"], samples=shown),
            drawn=state["drawn"],
        )


def _spread(value: Any) -> Any:
    """The figure, of which JSON made a list."""
    return events.Spread(*value) if isinstance(value, list) else value
