"""The GPUs of this machine, counted without starting CUDA in this process."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""The files of which a machine with a driver has one."""


def visible(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a process may use, as CUDA_VISIBLE_DEVICES would list them: numbers or ids."""
    here = count()
    named = environment.get(VISIBLE)
    if named is None:
        return [str(number) for number in range(here)]
    found: list[str] = []
    for name in (part.strip() for part in named.split(",")):
        # CUDA ignores everything from the first name on that it does not know.
        if not name or (name.lstrip("-").isdigit() and not 0 <= int(name) < here) or name in found:
            break
        found.append(name)
    return found if here else []


def rotated(gpus: Sequence[str], rank: int) -> str:
    """CUDA_VISIBLE_DEVICES of a rank: its own GPU first, the others after it.

    With its own GPU in first place every rank compiles for ``cuda:0`` and shares one cache. The others stay visible,
    because NCCL assumes that it can reach a GPU that it does not see.
    """
    first = rank % len(gpus)
    return ",".join([*gpus[first:], *gpus[:first]])


def count() -> int:
    """GPUs of this machine."""
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        number = ctypes.c_uint(0)
        if nvml.nvmlInit_v2() == 0:
            try:
                if nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)) == 0:
                    return number.value
            finally:
                nvml.nvmlShutdown()
    if not any(Path(device).exists() for device in DEVICES):
        return 0
    # A driver without NVML. torch counts in a process of its own, which starts CUDA perhaps.
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"],
        capture_output=True,
        text=True,
        check=False,
    )
    return int(done.stdout) if done.stdout.strip().isdigit() else 0
