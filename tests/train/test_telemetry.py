"""Telemetry with an NVML that is none: what is read, when, and that nothing waits for it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing
import torch

from surogate_core.events import GpuStats
from surogate_core.train.telemetry import GpuTelemetry


class FakeNvml:
    """As nvidia-ml-py, of one GPU."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.answers = threading.Event()
        self.answers.set()
        self.error: Exception | None = None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.current_thread().name)

    def nvmlInit(self) -> None:  # noqa: N802
        self._called("init")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._called("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self._called(uuid)
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:  # noqa: N802
        assert handle == "handle"
        self.answers.wait(10)
        if self.error is not None:
            raise self.error
        self._called("rates")
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:  # noqa: N802
        return SimpleNamespace(used=5 << 30, total=80 << 30, free=75 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:  # noqa: N802
        return 412_500

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:  # noqa: N802
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:  # noqa: N802
        assert kind == self.NVML_CLOCK_SM
        return 1755


def test_a_reading_in_the_units_of_the_event() -> None:
    nvml = FakeNvml()
    telemetry = GpuTelemetry("GPU-1", nvml=nvml)
    assert telemetry.take() is None
    telemetry.ask(100)
    assert telemetry.take(wait=10) == GpuStats(
        step=100,
        utilization=0.87,
        memory_used_bytes=5 << 30,
        memory_total_bytes=80 << 30,
        power_watts=412.5,
        temperature_celsius=61.0,
        sm_clock_mhz=1755.0,
    )
    assert telemetry.take() is None
    telemetry.ask(200)
    assert telemetry.take(wait=10).step == 200  # type: ignore[union-attr]
    telemetry.close()
    assert nvml.calls == ["init", "GPU-1", "rates", "rates", "shutdown"]
    assert nvml.threads == {"surogate-nvml"}


def test_nothing_waits_for_a_slow_driver() -> None:
    nvml = FakeNvml()
    nvml.answers.clear()
    telemetry = GpuTelemetry("GPU-1", nvml=nvml)
    for step in (100, 200, 300):
        telemetry.ask(step)
        assert telemetry.take() is None
    nvml.answers.set()
    assert telemetry.take(wait=10).step == 100  # type: ignore[union-attr]
    assert telemetry.take() is None
    telemetry.close()


def test_one_failure_ends_it_and_the_log_says_why() -> None:
    nvml = FakeNvml()
    nvml.error = RuntimeError("driver is gone")
    telemetry = GpuTelemetry("GPU-1", nvml=nvml)
    with structlog.testing.capture_logs() as logs:
        for step in (1, 2, 3):
            telemetry.ask(step)
            assert telemetry.take(wait=10 if step == 1 else 0) is None
    telemetry.close()
    assert [entry["reason"] for entry in logs] == ["RuntimeError('driver is gone')"]
    assert nvml.calls == ["init", "GPU-1", "shutdown"]


def test_without_the_package_the_log_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    telemetry = GpuTelemetry("GPU-1")
    with structlog.testing.capture_logs() as logs:
        telemetry.ask(1)
        telemetry.take(wait=10)
    telemetry.close()
    assert [entry["fix"] for entry in logs] == ["pip install nvidia-ml-py"]


def test_a_cpu_has_none() -> None:
    assert GpuTelemetry.of_device(torch.device("cpu")) is None
