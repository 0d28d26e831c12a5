"""CUDA C++ sources as functions that take torch tensors.

A source is compiled by NVRTC through CuPy when one of its functions is first launched; CuPy keeps
the result on disk, keyed by source, flags, architecture and toolkit. A binary that ``make native``
made of the same source is taken instead.
"""

from __future__ import annotations

import hashlib
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NATIVE = Path(__file__).parent / "native"
"""The sources: ``kernels/NAME.cu``, ``include/*.cuh``; ``build/`` holds what ``make native`` made of them."""

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
"""What the sources are compiled for ahead of time; the tests compile for each."""

FLAGS = ("-std=c++17",)

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


def source_of(name: str) -> str:
    """The source ``kernels/NAME.cu`` with its own headers put in, each once: one text that a cache can be keyed by."""
    seen: set[str] = set()

    def inlined(path: Path) -> str:
        def header(found: re.Match[str]) -> str:
            if found[1] in seen:
                return ""
            seen.add(found[1])
            return inlined(NATIVE / "include" / found[1])

        return _INCLUDE.sub(header, path.read_text(encoding="utf-8").replace("#pragma once\n", ""))

    return inlined(NATIVE / "kernels" / f"{name}.cu")


def names() -> list[str]:
    """The sources there are."""
    return sorted(path.stem for path in (NATIVE / "kernels").glob("*.cu"))


def binary_name(name: str, architecture: str) -> str:
    """The file that holds the binary of the source as it is now, and of no other."""
    content = "\n".join((*FLAGS, source_of(name)))
    return f"{name}.{architecture}.{hashlib.sha256(content.encode()).hexdigest()[:16]}.cubin"


def architecture_of(device: torch.device) -> str:
    """``sm_90a`` for a Hopper: the architecture-specific target where there is one."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class _Stream:
    """torch's stream by the CUDA stream protocol, which not every torch has."""

    def __init__(self, pointer: int):
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


class Module:
    """One source, loaded when it is needed, once for each device."""

    def __init__(self, name: str):
        self.name = name
        self._loaded: dict[int, Any] = {}

    @cached_property
    def _source(self) -> str:
        return source_of(self.name)

    def _load(self, device: torch.device) -> Any:
        import cupy

        index = device.index or 0
        if index not in self._loaded:
            with cupy.cuda.Device(index):
                binary = NATIVE / "build" / binary_name(self.name, architecture_of(device))
                if binary.exists():
                    self._loaded[index] = cupy.RawModule(path=str(binary))
                else:
                    self._loaded[index] = cupy.RawModule(code=self._source, options=FLAGS, backend="nvrtc")
        return self._loaded[index]

    def launch(
        self, function: str, grid: tuple[int, ...], block: int, *arguments: Tensor | int | float | np.generic
    ) -> None:
        """Launch on the current stream of the first tensor's device, without waiting and without copying.

        Tensors are passed as pointers; a Python int is a ``long long``, a float is a ``float``, a numpy
        scalar is itself.
        """
        import cupy
        import torch

        device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
        kernel = self._load(device).get_function(function)
        converted: list[Any] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                converted.append(argument.data_ptr())
            else:
                converted.append(np.float32(argument) if isinstance(argument, float) else argument)
        stream = _Stream(torch.cuda.current_stream(device).cuda_stream)
        with cupy.cuda.Device(device.index or 0), cupy.cuda.Stream.from_external(stream):
            kernel(grid, (block,), tuple(converted))
