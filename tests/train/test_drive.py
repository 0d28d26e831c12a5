"""Training without a run: the steps, rates and evaluations of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from surogate_core.config.schema import RunConfig
from surogate_core.plugins import load_plugins
from surogate_core.train.drive import ReadySteps, drive
from surogate_core.train.lr import Schedule


class Engine:
    """Records what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def train_step(self, batches: list[Any], *, step: int, lr: float) -> Any:
        self.calls.append((step, batches, lr))
        return f"result {step}"

    def evaluate(self, batches: Any) -> tuple[float, int]:
        self.calls.append(list(batches))
        return float(len(self.calls)), 1


class Steps:
    epoch, steps_per_epoch = 0.0, 2.5

    def __init__(self) -> None:
        self.made: Iterator[int] = iter(range(99))

    def next_step(self) -> list[Any]:
        return [next(self.made)]


CONFIG = RunConfig(max_steps=5, eval_steps=2, warmup_steps=2, learning_rate=0.25, lr_scheduler_type="linear")
RATES = Schedule.of(CONFIG, load_plugins())


def test_every_step_in_order_with_the_rates_of_the_configuration() -> None:
    engine = Engine()
    taken = list(drive(CONFIG, engine, Steps(), None, RATES))  # type: ignore[arg-type]
    assert [(t.step, t.total, t.result) for t in taken] == [
        (0, 5, None),
        *((step, 5, f"result {step - 1}") for step in range(1, 6)),
    ]
    assert engine.calls == [(step, [step], RATES.rates(5)(step)) for step in range(5)]
    assert [rate for _, _, rate in engine.calls][:2] == [0.125, 0.25]
    assert all(t.held is None for t in taken)


@pytest.mark.parametrize(("every", "at"), [(2, [0, 2, 4, 5]), (0, [0, 5]), (1, [0, 1, 2, 3, 4, 5])])
def test_evaluations_are_those_of_a_run(every: int, at: list[int]) -> None:
    config = replace(CONFIG, eval_steps=every)
    taken = list(drive(config, Engine(), Steps(), ["held out"], RATES))  # type: ignore[arg-type]
    assert [t.step for t in taken if t.held is not None] == at


def test_epochs_decide_where_no_steps_are_named() -> None:
    config = replace(CONFIG, max_steps=-1, num_epochs=2.0)
    assert [t.total for t in drive(config, Engine(), Steps(), None, RATES)][-1] == 5  # type: ignore[arg-type]


def test_ready_micro_batches_are_steps() -> None:
    engine = Engine()
    config = replace(CONFIG, max_steps=2)
    assert [t.step for t in drive(config, engine, ReadySteps([["a"], ["b"]]), None, RATES)] == [0, 1, 2]  # type: ignore[arg-type,list-item]
    assert [batches for _, batches, _ in engine.calls] == [["a"], ["b"]]
