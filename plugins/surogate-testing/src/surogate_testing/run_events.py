"""Events of a short run, for tests of monitors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from surogate_core.plugin import events

START = events.RunStart(
    model="m",
    parameters=1,
    trainable_parameters=1,
    train_tokens=1,
    steps=9,
    start_step=0,
    tokens_per_step=1,
    epochs=1.0,
    device="cpu",
)
END = events.RunEnd(reason="finished", step=3, seconds=1.0, first_eval_loss=2.0, last_eval_loss=1.0, export_path=None)


def step(number: int, loss: float, **changes: Any) -> events.StepEnd:
    """A step with this loss; other fields as given, or as they are in every step."""
    fields: dict[str, Any] = {
        "epoch": 0.5,
        "grad_norm": 2.0,
        "lr": 1e-3,
        "tokens": 1,
        "label_tokens": 1,
        "total_tokens": number,
        "seconds": 0.1,
        "tokens_per_second": 10.0,
        "eta_seconds": 0.0,
        "peak_memory_bytes": 2**30,
    }
    return events.StepEnd(step=number, loss=loss, **(fields | changes))


def info(**config: Any) -> events.RunInfo:
    """A run of SFT whose configuration has these flat keys; without a warm-up unless one is given."""
    values = {"learning_rate": 1e-3, "warmup_steps": 0, "warmup_ratio": 0.0, **config}
    return events.RunInfo(run_name="r", output_dir="o", task="sft", config=values, interactive=False)


def curve(
    steps: int,
    loss: Callable[[int], float],
    norm: Callable[[int], float] = lambda at: 1.0,
    lr: Callable[[int], float] = lambda at: 1e-3,
) -> list[events.Event]:
    """The start of a run and its steps, with the loss, gradient norm and learning rate of each step from 1 on."""
    every = (step(at, loss(at), grad_norm=norm(at), lr=lr(at)) for at in range(1, steps + 1))
    return [replace(START, steps=steps), *every]


def falling(at: int) -> float:
    """A loss that converges all the time, for `curve`."""
    return 2.0 + 2.0 * math.exp(-at / 300)


EVENTS = (
    events.Progress(task="t", done=0),
    START,
    step(1, 3.0),
    step(2, 2.5),
    events.EvalEnd(step=2, loss=1.25, label_tokens=1, seconds=0.1, gap=None),
    events.PhaseChange(step=2, phase="plateau", previous="warmup", improvement=0.0),
    events.Advice(step=2, rule="plateau", message="It stands.", key="k", suggestion="turn"),
    events.Samples(step=2, prompts=("Why?", "The chain"), texts=("<b>So.\nYes.", "")),
)
