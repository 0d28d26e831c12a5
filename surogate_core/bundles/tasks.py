"""Tasks: the micro-batches that a run trains on, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from surogate_core.batch import MicroBatch
    from surogate_core.config.schema import RunConfig
    from surogate_core.data.pipeline import PreparedData


class Steps(Protocol):
    """An endless stream of optimizer steps, whose position a checkpoint records."""

    @property
    def epoch(self) -> float:
        """Passes over the training data so far, with a fraction."""

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps in one pass; not a whole number unless the data divide evenly."""

    def next_step(self) -> list[MicroBatch]:
        """The micro-batches of the next optimizer step, as host tensors of the shapes of `Task.sample`.

        Called in a thread, one step ahead of the training.
        """

    def state(self) -> dict[str, Any]:
        """The position in the stream, as JSON values."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the step at which `state` was taken. Raises `UserError` if the data differ."""


class Evaluation(Protocol):
    """The held-out micro-batches: the same ones, in the same order, in every pass."""

    def __len__(self) -> int:
        """Micro-batches in one pass."""

    def __iter__(self) -> Iterator[MicroBatch]:
        """One pass; host tensors of the shapes of `Task.sample`."""


class Task(Protocol):
    """The task that a `TaskSpec` builds."""

    def sample(self) -> MicroBatch:
        """A micro-batch with the shapes of all others; the engine allocates for it before the first step."""

    def steps(self) -> Steps:
        """The steps from the beginning; equal data and keys give equal micro-batches."""

    def evaluation(self) -> Evaluation | None:
        """The held-out micro-batches, or None if nothing is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """A task: the training data and their division into steps."""

    name: str
    """The value of `task`, and the command ``surogate NAME``."""
    build: Callable[[RunConfig, PreparedData], Task]
    """(the run's configuration, the packed rows of its data sets) → the task."""
    adapters: bool = True
    """Whether it may train adapters; one that does not is refused with `lora`."""
    trains_prompts: bool = False
    """Whether it trains every token of a document on purpose, so the run does not warn about it."""
