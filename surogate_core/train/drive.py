"""Training without a run around it, for studies and benchmarks: the same steps, rates and evaluations as a run's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from surogate_core.batch import MicroBatch
from surogate_core.bundles import Evaluation, Steps
from surogate_core.config.schema import RunConfig
from surogate_core.engine.engine import Engine, StepResult
from surogate_core.train.loop import evaluation_due, total_steps
from surogate_core.train.lr import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step that was taken, or the evaluation before the first one."""

    step: int
    """Optimizer steps done; 0 before the first."""
    total: int
    """Optimizer steps of the whole training."""
    result: StepResult | None
    """None where `step` is 0."""
    held: float | None
    """The held-out loss after the step, where an evaluation was due."""


class ReadySteps:
    """Micro-batches that are there already, as steps; a study that is not resumed needs no more."""

    epoch, steps_per_epoch = 0.0, math.inf

    def __init__(self, steps: Iterable[list[MicroBatch]]):
        """`steps`: the micro-batches of each optimizer step."""
        self._steps = iter(steps)

    def next_step(self) -> list[MicroBatch]:
        """The next ones."""
        return next(self._steps)

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to continue."""


def drive(
    config: RunConfig, engine: Engine, steps: Steps, evaluation: Evaluation | None, schedule: Schedule
) -> Iterator[Taken]:
    """Train the engine on all steps that the configuration asks for, one for each item.

    Nothing is prefetched, saved or watched. The caller checks whether a loss is finite. With steps of `ReadySteps` the
    configuration must say `max_steps`.
    """
    total = total_steps(config, steps, done=0)
    rate = schedule.rates(total)
    for done in range(total + 1):
        result = None
        if done:
            step = done - 1
            result = engine.train_step(steps.next_step(), step=step, lr=rate(step))
        due = evaluation is not None and evaluation_due(done, total=total, every=config.eval_steps)
        held = engine.evaluate(evaluation)[0] if due and evaluation is not None else None
        yield Taken(step=done, total=total, result=result, held=held)
