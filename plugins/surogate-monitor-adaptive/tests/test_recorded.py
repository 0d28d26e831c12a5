"""Curves of real runs of the small model, replayed: what each is told, and that healthy ones are told nothing.

`scripts/record_runs.py` has made `data/`; the command of each run is in it. `pytest -rP` shows what each was told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from surogate_monitor_adaptive.advisor import RULES
from surogate_monitor_adaptive.monitor import replay

from surogate_core.plugin import events

DATA = Path(__file__).parent / "data"
RUNS: dict[str, Any] = json.loads((DATA / "runs.json").read_text())
HEALTHY: dict[str, Any] = json.loads((DATA / "healthy.json").read_text())
TUNINGS: dict[str, Any] = json.loads((DATA / "tunings.json").read_text())

TOLD: dict[str, list[tuple[int, str]]] = {
    "healthy": [],
    "lr_too_high": [
        (145, "loss_spike"),
        (145, "warmup_too_short"),
        (153, "gradient_acceleration"),
        (188, "divergence"),
        (300, "plateau_high_lr"),
        (376, "loss_spike"),
        (381, "gradient_acceleration"),
        (388, "divergence"),
    ],
    "warmup_too_short": [(3, "loss_spike"), (3, "warmup_too_short")],
    "plateau": [(550, "plateau")],
    "divergence": [
        (133, "loss_spike"),
        (133, "warmup_too_short"),
        (141, "gradient_acceleration"),
        (166, "divergence"),
        (250, "plateau_high_lr"),
    ],
    "nan_spike": [(250, "loss_spike")],
}
"""Run → (step, rule)."""

TURN = {
    "lr_too_high": "learning_rate",
    "warmup_too_short": "warmup_steps",
    "plateau": "num_epochs",
    "divergence": "learning_rate",
    "nan_spike": "auto_lr_reduction",
}
"""Run → the key that a practitioner would turn."""


def events_of(run: dict[str, Any], rates: Sequence[float]) -> Iterator[events.Event]:
    """The recorded run as its monitors saw it, but for what no rule reads."""
    begin, held_out = run["start"], dict(run["held_out"])
    tokens = begin["tokens_per_step"]
    yield events.RunStart(
        model="tiny",
        parameters=begin["parameters"],
        trainable_parameters=begin["parameters"],
        train_tokens=begin["train_tokens"],
        steps=begin["steps"],
        start_step=0,
        tokens_per_step=tokens,
        epochs=begin["epochs"],
        device="cpu",
    )
    if 0 in held_out:
        yield events.EvalEnd(step=0, loss=held_out[0], label_tokens=1, seconds=0.1, gap=None)
    for step, (loss, norm, rate) in enumerate(zip(run["loss"], run["grad_norm"], rates, strict=True), start=1):
        yield events.StepEnd(
            step=step,
            epoch=0.0,
            loss=float(loss),
            grad_norm=float(norm),
            lr=rate,
            tokens=tokens,
            label_tokens=tokens,
            total_tokens=tokens * step,
            seconds=0.1,
            tokens_per_second=10.0 * tokens,
            eta_seconds=0.0,
            peak_memory_bytes=0,
        )
        if step in held_out:
            yield events.EvalEnd(step=step, loss=held_out[step], label_tokens=1, seconds=0.1, gap=None)


def controls(run: dict[str, Any], rates: Sequence[float], **config: Any) -> list[events.Control]:
    values = {**run["config"], **config}
    info = events.RunInfo(run_name="r", output_dir="o", task="sft", config=values, interactive=False)
    return replay(events_of(run, rates), info)


def advices(found: Sequence[events.Control]) -> list[events.Advice]:
    return [event for control in found for event in control.events if isinstance(event, events.Advice)]


def phases(run: dict[str, Any], rates: Sequence[float]) -> set[str]:
    return {e.phase for control in controls(run, rates) for e in control.events if isinstance(e, events.PhaseChange)}


def test_no_healthy_run_is_unstable() -> None:
    """Three families, LoRA and all weights, rates from 2e-4 to 3e-3, 1 to 8 rows a batch; and the demo."""
    runs = {**TUNINGS["healthy"], "the demo": RUNS["healthy"]}
    assert len(runs) > 20
    wrong = {name: found & {"unstable", "diverging"} for name, run in runs.items() if (found := phases(run, run["lr"]))}
    assert {name for name, found in wrong.items() if found} == set()
    assert all(phases(run, HEALTHY["0"]["lr"]) == {"converging"} for run in HEALTHY.values())


def test_every_unstable_run_is_unstable() -> None:
    runs = {**TUNINGS["unstable"], **{name: RUNS[name] for name in ("lr_too_high", "warmup_too_short")}}
    assert len(runs) > 5
    assert {name for name, run in runs.items() if "unstable" not in phases(run, run["lr"])} == set()


def test_every_run_has_its_expectation() -> None:
    assert RUNS.keys() == TOLD.keys()
    assert {rule for told in TOLD.values() for _, rule in told} <= RULES.keys()
    assert len(HEALTHY) == 20


@pytest.mark.parametrize("name", TOLD)
def test_a_recorded_run_is_told_what_is_wrong(name: str) -> None:
    run = RUNS[name]
    found = advices(controls(run, run["lr"]))
    print(f"{name}: {run['command']}")  # noqa: T201
    for one in found:
        print(f"  step {one.step:>3}  {one.rule:22} {one.key}: {one.suggestion}")  # noqa: T201
    assert [(one.step, one.rule) for one in found] == TOLD[name]
    if name in TURN:
        assert TURN[name] in {one.key for one in found}


def test_a_nan_is_survived_with_the_guard_and_the_loss_goes_on_falling() -> None:
    run = RUNS["nan_spike"]
    assert run["grad_norm"][249] == "NaN"
    (control,) = [c for c in controls(run, run["lr"]) if c.lr_scale is not None]
    assert (control.lr_scale, control.fade_steps, control.proceed) == (0.5, 50, True)
    # The rate is half of what it would be, and blends back over 50 steps.
    healthy = RUNS["healthy"]
    shares = [a / b for a, b in zip(run["lr"], healthy["lr"], strict=True)]
    assert shares[249:252] == pytest.approx([1.0, 0.5, 0.51], abs=0.001)
    assert shares[299:] == pytest.approx([0.99] + [1.0] * 100, abs=0.001)
    assert run["held_out"][-1][1] == pytest.approx(healthy["held_out"][-1][1], abs=0.02)


@pytest.mark.parametrize("asked", [{}, {"auto_lr_reduction": True, "early_stop": True}], ids=["watching", "acting"])
def test_no_false_alarm_on_20_healthy_runs(asked: dict[str, Any]) -> None:
    alarms = {}
    for seed, run in HEALTHY.items():
        found = controls(run, HEALTHY["0"]["lr"], **asked)
        wrong = [(a.step, a.rule) for a in advices(found)] + [c.reason for c in found if c.lr_scale or c.stop]
        if wrong:
            alarms[seed] = wrong
    assert not alarms
