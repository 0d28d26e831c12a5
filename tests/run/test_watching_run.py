"""Whole runs: speed of light in every step, telemetry when there is a GPU to ask, further monitors by `report_to`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_core.bundles import ReportSpec
from surogate_core.config.resolve import load_run_config
from surogate_core.errors import ConfigError, MachineError
from surogate_core.events import Event, GpuStats, ReportWritten, RunEnd
from surogate_core.plugins.discovery import core_plugin
from surogate_core.plugins.registry import Offered, Registry
from surogate_core.train.bus import EventBus

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]


class Gpu:
    """Answers one step late, as a thread would."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.waiting: int | None = None
        self.closed = False

    def ask(self, step: int) -> None:
        self.asked.append(step)
        self.waiting = step

    def take(self, *, wait: float = 0.0) -> GpuStats | None:
        step, self.waiting = self.waiting, None
        if step is None:
            return None
        return GpuStats(
            step=step,
            utilization=0.5,
            memory_used_bytes=1 << 30,
            memory_total_bytes=8 << 30,
            power_watts=300.0,
            temperature_celsius=50.0,
            sm_clock_mhz=1500.0,
        )

    def close(self) -> None:
        self.closed = True


def test_speed_of_light_and_telemetry_are_recorded_and_change_no_bit(
    tmp_path: Path,
    base: list[str],
    run_here: RunHere,
    records: Records,
    history: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_here(tmp_path / "plain", *base, "log_gpu_util=0")
    gpu = Gpu()
    monkeypatch.setattr("surogate_core.train.telemetry.GpuTelemetry.of_device", lambda device: gpu)
    run_here(tmp_path / "run", *base, "log_gpu_util=2")
    assert history(tmp_path / "run") == history(tmp_path / "plain")
    (start,) = records(tmp_path / "run", "run_start")
    steps = records(tmp_path / "run", "step_end")
    assert start["gemm_flops_per_second"] > 0
    shares = {round(s["speed_of_light"] * s["seconds"] * start["gemm_flops_per_second"] / s["tokens"]) for s in steps}
    # FLOPs a token: the products, and attention over documents of different lengths.
    assert max(shares) < 1.1 * min(shares)
    assert gpu.asked == [2, 4, 6]
    assert gpu.closed
    assert [(line["step"], line["utilization"]) for line in records(tmp_path / "run", "gpu_stats")] == [
        (2, 0.5),
        (4, 0.5),
    ]
    report = (tmp_path / "run" / "report.html").read_text()
    assert "<figcaption>GPU power (W)</figcaption>" in report
    assert "<figcaption>MFU (" in report
    assert "<figcaption>GPU power" not in (tmp_path / "plain" / "report.html").read_text()


def test_a_device_without_room_to_be_measured_trains_all_the_same(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> float:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("surogate_core.run.prepare.gemm_flops_per_second", full)
    assert run_here(tmp_path / "run", *base, "max_steps=1") == 0
    assert records(tmp_path / "run", "run_start")[0]["gemm_flops_per_second"] is None
    assert records(tmp_path / "run", "step_end")[0]["speed_of_light"] is None


def test_the_report_is_named_when_it_is_there(
    tmp_path: Path,
    base: list[str],
    run_here: RunHere,
    installed: Registry,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    seen: list[Event] = []
    emit = EventBus.emit
    monkeypatch.setattr(EventBus, "emit", lambda bus, event: seen.append(event) or emit(bus, event))
    run_here(tmp_path / "run", *base, "max_steps=1")
    assert isinstance(seen[-1], ReportWritten)
    assert Path(seen[-1].path) == tmp_path / "run" / "report.html"
    assert Path(seen[-1].path).is_file()

    def full(directories: object) -> list[Path]:
        raise MachineError("the disk is full")

    spec = Offered(bundle=ReportSpec(name="full", write=full), plugin=core_plugin())
    monkeypatch.setitem(installed._offers, "report", {"full": spec})
    assert run_here(tmp_path / "full", *base, "max_steps=1") == 0
    assert isinstance(seen[-1], RunEnd)
    assert "a report was not written" in "".join(capsys.readouterr())


def test_without_a_plugin_for_reports_a_run_ends_without_one(
    tmp_path: Path, base: list[str], run_here: RunHere, installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Event] = []
    emit = EventBus.emit
    monkeypatch.setattr(EventBus, "emit", lambda bus, event: seen.append(event) or emit(bus, event))
    monkeypatch.setitem(installed._offers, "report", {})
    assert run_here(tmp_path / "none", *base, "max_steps=1") == 0
    assert isinstance(seen[-1], RunEnd)
    assert not list((tmp_path / "none").glob("report.*"))


def names(registry: Registry, *overrides: str, file: Path | None = None) -> list[str]:
    config = load_run_config(list(overrides), config_file=file, registry=registry)
    return [chosen.name for chosen in config.monitor]


def test_report_to_adds_monitors(tmp_path: Path, installed: Registry) -> None:
    assert names(installed, "report_to=[tensorboard]") == ["console", "jsonl", "adaptive", "tensorboard"]
    assert names(installed, "report_to=[jsonl]", "monitor=[jsonl]") == ["jsonl"]
    assert names(installed, "report_to=null") == ["console", "jsonl", "adaptive"]
    file = tmp_path / "run.yaml"
    file.write_text("report_to: [tensorboard]\nmonitor:\n- name: jsonl\n  progress: true\n")
    assert names(installed, file=file) == ["jsonl", "tensorboard"]
    assert names(installed, "monitor.tensorboard.directory=tb", file=file) == ["jsonl", "tensorboard"]


def test_a_run_is_repeated_from_its_own_configuration(
    tmp_path: Path, base: list[str], run_here: RunHere, installed: Registry
) -> None:
    run_here(tmp_path / "run", *base, "max_steps=1", "report_to=[jsonl]", "monitor=[]")
    assert names(installed, file=tmp_path / "run" / "config.yaml") == ["jsonl"]


@pytest.mark.parametrize(
    ("given", "message"),
    [("[tensorbored]", "report_to"), ("tensorbored", "report_to"), ("[1]", "report_to")],
)
def test_report_to_of_something_else(installed: Registry, given: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        names(installed, f"report_to={given}")
    (problem,) = raised.value.problems
    assert problem.key.startswith(message)
