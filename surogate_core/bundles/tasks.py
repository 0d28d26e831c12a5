"""Tasks: the micro-batches that a run trains on, step by step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from surogate_core.batch import Counts, MicroBatch
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


class SharedSteps(Steps, Protocol):
    """Steps that need not make the micro-batches that other ranks run; other steps make all of them on every rank."""

    def next_share(self, own: Container[int]) -> list[MicroBatch | Counts]:
        """As `next_step`: micro-batches where their number in the step is in `own`, and `Counts` of the others.

        The counts have the bits of `MicroBatch.counts`: the loss is divided by them on every rank.
        """


def next_share(steps: Steps, own: Container[int]) -> list[MicroBatch | Counts]:
    """The next step for the rank that runs the micro-batches `own`."""
    if _can_share(steps):
        return cast("SharedSteps", steps).next_share(own)
    return [batch if number in own else batch.counts() for number, batch in enumerate(steps.next_step())]


def _can_share(steps: Steps) -> bool:
    """Whether `next_share` belongs to this `next_step`, which a task may have replaced alone."""
    for names in (getattr(steps, "__dict__", {}), *(vars(kind) for kind in type(steps).__mro__)):
        if "next_share" in names or "next_step" in names:
            return "next_share" in names
    return False


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
