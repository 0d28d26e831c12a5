"""Checks of monitors: they take every event, keep JSON, and the run outlives them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from surogate_core.bundles import Monitor, MonitorSpec
from surogate_core.errors import MachineError
from surogate_core.testing.check import NotApplicable, ensure
from surogate_core.train.bus import EventBus
from surogate_core.train.events import (
    Advice,
    CheckpointSaved,
    Control,
    EvalEnd,
    Event,
    GpuStats,
    Notice,
    PhaseChange,
    PrecisionStats,
    Progress,
    ReportWritten,
    RoutingStats,
    RunEnd,
    RunInfo,
    RunStart,
    StepEnd,
)

_STEP: dict[str, Any] = {
    "epoch": 0.1, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64, "label_tokens": 32, "total_tokens": 64, "seconds": 0.1,
    "tokens_per_second": 640.0, "eta_seconds": 1.0, "peak_memory_bytes": 1 << 20, "speed_of_light": 0.4,
}  # fmt: skip


def events() -> list[Event]:
    """One run, in the order in which it would emit them; a loss and a norm that are not finite are among them."""
    steps = [StepEnd(step=n, loss=3.0 / n, **_STEP) for n in (1, 2)]
    bad = StepEnd(step=3, loss=float("nan"), **(_STEP | {"grad_norm": float("inf")}))
    return [
        Progress(task="loading weights", done=1, total=2),
        RunStart(
            model="tiny", parameters=100, trainable_parameters=10, train_tokens=1000, steps=3, start_step=0,
            tokens_per_step=64, epochs=1.0, device="cpu", notes=("a note",),
        ),
        EvalEnd(step=0, loss=4.0, label_tokens=32, seconds=0.1, gap=None),
        *steps,
        PhaseChange(step=2, phase="plateau", previous="warmup", improvement=0.0),
        Advice(step=2, rule="plateau", message="a plateau", key="learning_rate", suggestion="lower it"),
        GpuStats(
            step=2, utilization=0.9, memory_used_bytes=1 << 30, memory_total_bytes=1 << 36, power_watts=400.0,
            temperature_celsius=50.0, sm_clock_mhz=1800.0,
        ),
        RoutingStats(step=2, imbalance=1.5, utilization=0.9, aux_loss=1.0),
        PrecisionStats(
            step=2, steps=2, saturated={"activation": 0.1, "gradient": 0.0}, underflowed={"activation": 0.0},
            worst="layer 0 mlp.up_proj activation", worst_excess=1.5,
        ),
        Notice(level="warning", message="something", data={"key": 1}),
        bad,
        EvalEnd(step=3, loss=2.0, label_tokens=32, seconds=0.1, gap=0.5),
        CheckpointSaved(step=3, path="checkpoint-3", seconds=0.1, reason="end"),
        RunEnd(
            reason="finished", step=3, seconds=1.0, first_eval_loss=4.0, last_eval_loss=2.0, export_path=None
        ),
        ReportWritten(path="report.html"),
    ]  # fmt: skip


class _Recorder:
    """Sees what comes past the monitor under test."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def on_event(self, event: Event) -> Control | None:
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

    def __init__(self, inner: Monitor):
        super().__init__()
        self.inner = inner

    def on_event(self, event: Event) -> Control | None:
        if isinstance(event, StepEnd) and event.step == 2:
            raise RuntimeError("raised by the conformance kit")
        return self.inner.on_event(event)

    def close(self) -> None:
        self.inner.close()


@contextmanager
def _built(spec: MonitorSpec) -> Iterator[Monitor]:
    with tempfile.TemporaryDirectory() as directory:
        info = RunInfo(run_name="check", output_dir=directory, task="sft", config={}, interactive=False)
        try:
            monitor = spec.build(spec.options(), info)
        except MachineError as error:
            raise NotApplicable(str(error)) from error
        yield monitor


def sees_a_run(spec: MonitorSpec) -> None:
    """It takes every event of a run, non-finite figures too, answers with controls or nothing, and can be closed."""
    with _built(spec) as monitor:
        bus = EventBus({"it": monitor})
        for event in events():
            for control in bus.emit(event):
                ensure(isinstance(control, Control), f"it answered {event.name} with {control!r:.60}")
            ensure("it" in bus.names, f"it failed at {event.name}")
        monitor.close()


def keeps_json(spec: MonitorSpec) -> None:
    """Its state is JSON, and is the same in a monitor that has loaded it."""
    with _built(spec) as monitor, _built(spec) as other:
        for event in events():
            monitor.on_event(event)
        state = json.loads(json.dumps(monitor.state()))
        other.load_state(state)
        ensure(json.loads(json.dumps(other.state())) == state, "state() after load_state(s) is not s")
        monitor.close()
        other.close()


def is_isolated(spec: MonitorSpec) -> None:
    """Where it raises, the run goes on: it is closed and left out with a notice, the others see every event."""
    with _built(spec) as monitor:
        recorder = _Recorder()
        bus = EventBus({"it": _Failing(monitor), "recorder": recorder})
        for event in events():
            bus.emit(event)
        ensure(bus.names == ("recorder",), f"listening after the failure: {bus.names}")
        notices = [e.message for e in recorder.seen if isinstance(e, Notice) and "monitor it failed" in e.message]
        ensure(len(notices) == 1, f"{len(notices)} notices of the failure")
        ensure(len(recorder.seen) == len(events()) + 1, "another monitor has missed events")
        bus.close()


CHECKS = (sees_a_run, keeps_json, is_isolated)
