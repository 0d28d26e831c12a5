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
from torch import Tensor

from surogate_core.plugin import bundles, compute
from surogate_core.service.kernels import source_of, unpacking
from surogate_testing.check import ensure

COMPILER = shutil.which("g++")
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread", "-w")
SLOTS, FLOATS = 18, 8
"""Pointers and integers, and floats, that a kernel may have; as in the header."""


THREADS = 32
"""Threads of a block, which replaces the number in the source."""


_BF16X2 = re.compile(r'asm\("cvt\.rn\.bf16x2\.f32 [^"]*" : "=r"\((\w+)\) : "f"\((\w+)\), "f"\((\w+)\)\);')
"""The one instruction that sources write in assembly and the host has a function for."""


@cache
def _library(sources: compute.Sources, name: str) -> ctypes.CDLL:
    assert COMPILER is not None
    # The toolkit's headers are excluded, because the host has its own.
    text, changed = re.subn(
        r"constexpr int threads = \d+;", f"constexpr int threads = {THREADS};", source_of(sources, name)
    )
    assert changed == 1
    text = _BF16X2.sub(r"\1 = host_bf16x2(\3, \2);", text)
    lines = [line for line in text.splitlines() if not line.startswith("#include")]
    with TemporaryDirectory() as directory:
        source, binary = Path(directory, f"{name}.cpp"), Path(directory, f"{name}.so")
        header = Path(__file__).with_suffix(".h").read_text(encoding="utf-8").replace("#pragma once", "")
        source.write_text("\n".join((header, *lines)), encoding="utf-8")
        subprocess.run([COMPILER, *FLAGS, str(source), "-o", str(binary)], check=True)
        return ctypes.CDLL(str(binary))


class HostModule:
    """Replaces a `surogate_core.kernels.building.native.Module`: kernels run on the CPU, on CPU tensors."""

    def __init__(self, sources: compute.Sources, name: str):
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
        blocks = (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid)))
        library.launch(kernel, blocks, ctypes.c_uint(block), slots, wide)


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


def unpacks_on_host(unpacker: compute.Unpacker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels of a weight format run on CPU tensors. Skips the test if a compiler is missing."""
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    monkeypatch.setattr(unpacker, "_module", HostModule(unpacker._module.sources, unpacker._module.name))
    monkeypatch.setattr(unpacker, "runs", lambda room: True)
    monkeypatch.setattr(unpacking, "THREADS", THREADS)


def ensure_kernel_unpacks(
    weight_format: bundles.WeightFormat, shape: tuple[int, int], reference: Callable[[Tensor, Tensor], None]
) -> None:
    """Compare the kernels of a weight format with its reference: for a matrix in a wider one, and for experts."""
    draw = torch.Generator().manual_seed(0)
    outputs, inputs = shape
    weights = torch.randn(3, *shape, generator=draw) * torch.tensor([1.0, 1e-3, 1e30])[:, None, None]
    rows = [weight_format.pack(weight) for weight in weights.bfloat16()]
    packed = torch.stack([torch.nn.functional.pad(row, (0, -len(row) % 16 + 16)) for row in rows])
    expected = torch.empty(weights.shape, dtype=torch.bfloat16)
    for row, weight in zip(rows, expected, strict=True):
        reference(row, weight)
    panel = torch.full((outputs + 1, inputs + 8), 7.0, dtype=torch.bfloat16)
    weight_format.unpack(rows[0], panel[:-1, :inputs])
    ensure(torch.equal(panel[:-1, :inputs], expected[0]), f"{list(shape)}: other bits than the reference")
    panel[:-1, :inputs] = 7.0
    ensure(bool((panel == 7).all()), f"{list(shape)}: the kernel writes outside of the room")
    room = torch.full((4, outputs, inputs), 7.0, dtype=torch.bfloat16)
    weight_format.unpack_experts(packed, room[:3])
    ensure(torch.equal(room[:3], expected), f"{list(shape)}: experts have other bits than the reference")
    ensure(bool((room[3] == 7).all()), f"{list(shape)}: the kernel writes outside of the experts' room")
