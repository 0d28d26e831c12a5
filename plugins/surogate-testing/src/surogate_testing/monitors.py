"""Checks of monitors: they accept every event, their state is JSON, and the run survives their failure."""

from __future__ import annotations

import io
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from surogate_core.plugin import MachineError, bundles, events
from surogate_core.service.training import EventBus, fault_of
from surogate_testing.check import NotApplicable, ensure
from surogate_testing.guard import explained

_STEP: dict[str, Any] = {
    "epoch": 0.1, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64, "label_tokens": 32, "total_tokens": 64, "seconds": 0.1,
    "tokens_per_second": 640.0, "eta_seconds": 1.0, "peak_memory_bytes": 1 << 20, "speed_of_light": 0.4,
}  # fmt: skip


def events_of_run() -> list[events.Event]:
    """The events of one run in order, including a loss and a norm that are not finite."""
    steps = [events.StepEnd(step=n, loss=3.0 / n, figures={"rewards/margins": 0.1 * n}, **_STEP) for n in (1, 2)]
    bad = events.StepEnd(step=3, loss=float("nan"), **(_STEP | {"grad_norm": float("inf")}))
    return [
        events.Progress(task="loading weights", done=1, total=2),
        events.RunStart(
            model="tiny", parameters=100, trainable_parameters=10, train_tokens=1000, steps=3, start_step=0,
            tokens_per_step=64, epochs=1.0, device="cpu", notes=("a note",),
        ),
        events.EvalEnd(step=0, loss=4.0, label_tokens=32, seconds=0.1, gap=None),
        *steps,
        events.PhaseChange(step=2, phase="plateau", previous="warmup", improvement=0.0),
        events.Advice(step=2, rule="plateau", message="a plateau", key="learning_rate", suggestion="lower it"),
        events.GpuStats(
            step=2, utilization=0.9, memory_used_bytes=1 << 30, memory_total_bytes=1 << 36, power_watts=400.0,
            temperature_celsius=50.0, sm_clock_mhz=1800.0,
        ),
        events.RankStats(step=2, peak_memory_bytes=(1 << 30, 1 << 31), work_seconds=(0.01, 0.02)),
        events.BlockFigures(step=2, figures={"router.entropy": 1.2}),
        events.RoutingStats(
            step=2, moe_load_imbalance=1.5, moe_expert_utilization=0.9, moe_worst_imbalance=2.0, moe_worst_layer=3,
            moe_entropy=0.97, moe_cv=0.3, moe_dead_experts=1, moe_aux_loss=0.008, moe_aux_loss_raw=8.0,
        ),
        events.ExpertLoads(step=2, steps=2, layers=(1, 3), tokens=((4, 0), (2, 2))),
        events.PrecisionStats(
            step=2, steps=2, saturated={"activation": 0.1, "gradient": 0.0}, underflowed={"activation": 0.0},
            worst="layer 0 mlp.up_proj activation", worst_excess=1.5,
        ),
        events.Notice(level="warning", message="something", data={"key": 1}),
        *_rollouts(),
        bad,
        events.EvalEnd(step=3, loss=2.0, label_tokens=32, seconds=0.1, gap=0.5, figures={"rewards/margins": 0.2}),
        events.Samples(step=3, prompts=("Once upon",), texts=(" a time",)),
        events.CheckpointSaved(step=3, path="checkpoint-3", seconds=0.1, reason="end"),
        events.RunEnd(
            reason="finished", step=3, seconds=1.0, first_eval_loss=4.0, last_eval_loss=2.0, export_path=None
        ),
        events.ReportWritten(path="report.html"),
    ]  # fmt: skip


def _rollouts() -> list[events.Event]:
    """Those of a step of reinforcement learning in which a reward is not finite and one is missing."""
    sample = events.RolloutSample(
        prompt="2 + 2", completion=" 4", reward=1.0, rewards={"correct": 1.0, "format": None}, advantage=0.7,
        reason="stop", length=2,
    )  # fmt: skip
    missing = events.RolloutSample(prompt="2 + 2", completion=" [", reward=None, reason="timeout", length=8)
    lengths, rewards = events.Spread(5.0, 3.0, 2.0, 8.0), {"correct": events.Spread(0.5, 0.5, 0.0, 1.0)}
    return [
        events.Rollouts(
            step=3, prompts=2, completions=4, reward=events.Spread(0.5, float("nan"), 0.0, 1.0), rewards=rewards,
            without_signal=0.5, refills=1, kept=0.5, faults={"timeout": 1}, length=lengths, terminated_length=None,
            truncated=0.25, tokens=20, turns=1.5, seconds={"generate": 0.2, "score": 0.01},
        ),
        events.RolloutSamples(step=3, samples=(sample, missing)),
        events.RolloutEval(step=3, tasks=4, reward=None, faults={"timeout": 4}, length=lengths, tokens=20, seconds=0.1),
    ]  # fmt: skip


class _Recorder:
    """Receives the events that the monitor under test lets pass."""

    def __init__(self) -> None:
        self.seen: list[events.Event] = []

    def on_event(self, event: events.Event) -> events.Control | None:
        self.seen.append(event)
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """None to restore."""

    def close(self) -> None:
        """Nothing to release."""


class _Failing(_Recorder):
    """The monitor under test until its second step, where it raises."""

    def __init__(self, inner: bundles.Monitor):
        super().__init__()
        self.inner = inner
        self.closing: Exception | None = None

    def on_event(self, event: events.Event) -> events.Control | None:
        if isinstance(event, events.StepEnd) and event.step == 2:
            raise RuntimeError("raised by the conformance kit")
        return self.inner.on_event(event)

    def close(self) -> None:
        try:
            self.inner.close()
        except Exception as error:
            self.closing = error


SLOW_SECONDS = 1.0
"""Seconds above which an event is slow; the first one may be slow, because a monitor then imports its packages."""
SLOW_EVENTS = 3
"""Number of slow events with which a monitor delays the steps."""


@contextmanager
def _built(spec: bundles.MonitorSpec) -> Iterator[bundles.Monitor]:
    with tempfile.TemporaryDirectory() as directory:
        info = events.RunInfo(run_name="check", output_dir=directory, task="sft", config={}, interactive=False)
        try:
            with explained("build fails"):
                monitor = spec.build(spec.options(), info)
        except AssertionError as error:
            if isinstance(error.__cause__, MachineError):
                raise NotApplicable(str(error.__cause__)) from error
            raise
        yield monitor


def _shown(monitor: bundles.Monitor) -> None:
    """Send it the events of a run, and check its answers and its time."""
    slow = 0
    for event in events_of_run():
        begin = time.monotonic()
        with explained(f"on_event fails at {event.name}"):
            control = monitor.on_event(event)
        seconds = time.monotonic() - begin
        if control is not None:
            fault = fault_of(control)
            ensure(not fault, f"it answers {event.name} with {fault}")
            scale = control.lr_scale
            right = scale is None or (math.isfinite(scale) and scale >= 0)
            ensure(right, f"it answers {event.name} with lr_scale {scale}, which is not a finite number from 0 up")
        slow += seconds > SLOW_SECONDS
        ensure(slow < SLOW_EVENTS, f"on_event holds up the run: {slow} events took {seconds:.1f} s or so each")


def _closed(monitor: bundles.Monitor) -> None:
    with explained("close fails"):
        monitor.close()


def sees_a_run(spec: bundles.MonitorSpec) -> None:
    """It accepts every event of a run, non-finite figures too, in time, answers with controls or nothing, and
    closes.
    """
    with redirect_stdout(io.StringIO()) as printed, _built(spec) as monitor:
        _shown(monitor)
        _closed(monitor)
    text = printed.getvalue().strip()
    if not spec.prints:
        ensure(not text, f"it prints to standard output: {text[:60]!r}; a monitor that is meant to has `prints=True`")


def keeps_json(spec: bundles.MonitorSpec) -> None:
    """Its state is strict JSON, and a monitor that loads it returns the same state."""
    with _built(spec) as monitor, _built(spec) as other:
        _shown(monitor)
        with explained("state() fails"):
            found = monitor.state()
        try:
            state = json.loads(json.dumps(found, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise AssertionError(f"state() is not JSON: {error}; it is {found!r:.200}") from None
        ensure(isinstance(state, dict), f"state() is {type(found).__name__}, not a dictionary")
        with explained("load_state fails with what state() gave"):
            other.load_state(state)
        again = json.loads(json.dumps(other.state()))
        ensure(again == state, f"state() after load_state(s) is not s: {again!r:.100} for {state!r:.100}")
        _closed(monitor)
        _closed(other)


def is_isolated(spec: bundles.MonitorSpec) -> None:
    """If it raises, the run continues: it is closed and disabled with a notice, and the others receive every event."""
    with redirect_stdout(io.StringIO()), _built(spec) as monitor:
        recorder = _Recorder()
        failing = _Failing(monitor)
        bus = EventBus({"it": failing, "recorder": recorder})
        for event in events_of_run():
            bus.emit(event)
        ensure(bus.names == ("recorder",), f"after the failure these listen: {bus.names}")
        notices = [
            e.message for e in recorder.seen if isinstance(e, events.Notice) and "monitor it failed" in e.message
        ]
        ensure(len(notices) == 1, f"{len(notices)} notices of the failure: {notices}")
        ensure(len(recorder.seen) == len(events_of_run()) + 1, "another monitor has missed events")
        ensure(failing.closing is None, f"close fails: {failing.closing!r}")
        bus.close()


CHECKS = (sees_a_run, keeps_json, is_isolated)
