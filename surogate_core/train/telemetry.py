"""What NVML says of a GPU, read in a thread so that no step waits for the driver."""

from __future__ import annotations

import importlib
import threading
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import structlog
import torch

from surogate_core.events import GpuStats

log = structlog.get_logger(__name__)


class Nvml(Protocol):
    """The functions of the package nvidia-ml-py that are used."""

    nvmlInit: Any
    nvmlShutdown: Any
    nvmlDeviceGetHandleByUUID: Any
    nvmlDeviceGetUtilizationRates: Any
    nvmlDeviceGetMemoryInfo: Any
    nvmlDeviceGetPowerUsage: Any
    nvmlDeviceGetTemperature: Any
    nvmlDeviceGetClockInfo: Any
    NVML_TEMPERATURE_GPU: int
    NVML_CLOCK_SM: int


class GpuTelemetry:
    """One reading at a time of one GPU; after the first failure there are no more, and the log says why."""

    def __init__(self, uuid: str, *, nvml: Nvml | None = None):
        """`uuid` as NVML writes it, ``GPU-…``. `nvml` replaces the package, which the thread imports otherwise."""
        self._uuid, self._nvml = uuid, nvml
        self._handle: Any = None
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._read_out: SimpleQueue[GpuStats | Exception] = SimpleQueue()
        self._reading = self._failed = False
        # A daemon: a driver that never answers must not keep the process.
        self._thread = threading.Thread(target=self._work, name="surogate-nvml", daemon=True)
        self._thread.start()

    @classmethod
    def of_device(cls, device: torch.device) -> GpuTelemetry | None:
        """For a CUDA device; None elsewhere."""
        if device.type != "cuda":
            return None
        return cls(f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    def ask(self, step: int) -> None:
        """Begin a reading for `step`, unless one is still under way."""
        if not (self._reading or self._failed):
            self._reading = True
            self._asked.put(step)

    def take(self, *, wait: float = 0.0) -> GpuStats | None:
        """The reading that was asked for, once it is there; waits for it at most `wait` seconds."""
        if not self._reading:
            return None
        try:
            found = self._read_out.get(timeout=wait) if wait else self._read_out.get_nowait()
        except Empty:
            return None
        self._reading = False
        if isinstance(found, GpuStats):
            return found
        self._failed = True
        fix = "pip install nvidia-ml-py" if isinstance(found, ModuleNotFoundError) else "log_gpu_util=0"
        log.info("no GPU telemetry", reason=repr(found), fix=fix)
        return None

    def close(self) -> None:
        """Let the thread give NVML back and end; waits at most a second."""
        self._asked.put(None)
        self._thread.join(timeout=1.0)

    def _work(self) -> None:
        while (step := self._asked.get()) is not None:
            try:
                self._read_out.put(self._read(step))
            except Exception as error:
                self._read_out.put(error)
        if self._handle is not None:
            self._shut_down()

    def _read(self, step: int) -> GpuStats:
        if self._handle is None:
            if self._nvml is None:
                self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        nvml, handle = self._nvml, self._handle
        assert nvml is not None
        rates, memory = nvml.nvmlDeviceGetUtilizationRates(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
        return GpuStats(
            step=step,
            utilization=rates.gpu / 100,
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            power_watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            temperature_celsius=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            sm_clock_mhz=float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        )

    def _shut_down(self) -> None:
        try:
            assert self._nvml is not None
            self._nvml.nvmlShutdown()
        except Exception as error:
            log.info("NVML did not shut down", reason=repr(error))
