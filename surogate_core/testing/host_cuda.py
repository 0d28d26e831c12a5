"""Runs a kernel's source on the host, compiled by g++, for machines without a GPU.

The source may use as much of CUDA as `host_cuda.h` has. Each thread of a block is a thread of the host, so blocks are
small: the source's `threads` is changed.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import torch

from surogate_core.kernels.native import Sources, source_of

COMPILER = shutil.which("g++")
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread", "-w")
SLOTS, FLOATS = 18, 8
"""Pointers and integers, and floats, that a kernel may have; as in the header."""


THREADS = 32
"""Threads of a block, which replaces the number in the source."""


@cache
def _library(sources: Sources, name: str) -> ctypes.CDLL:
    assert COMPILER is not None
    # The toolkit's headers are excluded, because the host has its own.
    text, changed = re.subn(
        r"constexpr int threads = \d+;", f"constexpr int threads = {THREADS};", source_of(sources, name)
    )
    assert changed == 1
    lines = [line for line in text.splitlines() if not line.startswith("#include")]
    with TemporaryDirectory() as directory:
        source, binary = Path(directory, f"{name}.cpp"), Path(directory, f"{name}.so")
        header = Path(__file__).with_suffix(".h").read_text(encoding="utf-8").replace("#pragma once", "")
        source.write_text("\n".join((header, *lines)), encoding="utf-8")
        subprocess.run([COMPILER, *FLAGS, str(source), "-o", str(binary)], check=True)
        return ctypes.CDLL(str(binary))


class HostModule:
    """Replaces a `surogate_core.kernels.native.Module`: kernels run on the CPU, on CPU tensors."""

    def __init__(self, sources: Sources, name: str):
        self.sources = sources
        self.name = name

    def launch(self, function: str, grid: tuple[int, ...], block: int, *arguments: Any) -> None:
        """Like `Module.launch`. `block` must be `THREADS`."""
        assert block == THREADS
        library = _library(self.sources, self.name)
        floats = [a for a in arguments if isinstance(a, float)]
        rest = [a for a in arguments if not isinstance(a, float)]
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else int(a) for a in rest]
        slots = (ctypes.c_uint64 * SLOTS)(*values, *[0] * (SLOTS - len(values)))
        wide = (ctypes.c_float * FLOATS)(*floats, *[0.0] * (FLOATS - len(floats)))
        kernel = ctypes.cast(getattr(library, function), ctypes.c_void_p)
        library.launch(kernel, ctypes.c_uint(grid[0]), ctypes.c_uint(block), slots, wide)


def device_for(
    place: str,
    kernels: ModuleType,
    name: str,
    unavailable: Callable[[torch.device], str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> torch.device:
    """The GPU if `place` is "cuda"; otherwise the CPU, for which the source of `kernels`, a pack's module, is compiled.

    Skips the test if a GPU or a compiler is missing.
    """
    if place == "cuda":
        reason = unavailable(torch.device("cuda"))
        if reason is not None:
            pytest.skip(reason)
        return torch.device("cuda")
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    monkeypatch.setattr(kernels, "_MODULE", HostModule(kernels._MODULE.sources, name))
    monkeypatch.setattr(kernels, "THREADS", THREADS)
    return torch.device("cpu")
