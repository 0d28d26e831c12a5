"""CUDA C++ sources as functions that take torch tensors, for kernel packs.

A source is compiled by NVRTC through CuPy when one of its functions is first launched, and kept on disk, keyed by
source, flags, architecture and toolkit. A binary that ``make native`` made from the same source is used instead. A pack
has its sources in a directory ``native`` of its package: ``kernels/NAME.cu`` and ``include/*.cuh``; headers may also be
those of another distribution.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate_core.errors import MachineError
from surogate_core.files.private import private_directory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
"""The architectures that the sources are compiled for ahead of time; the tests compile for each."""

FLAGS = ("-std=c++17",)

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The CUDA C++ of one pack."""

    directory: Path
    """Has ``kernels/NAME.cu``, ``include/*.cuh`` and, after ``make native``, ``build/``."""
    shared: tuple[str, ...] = ()
    """Packages whose data ``include/*.cuh`` the sources include too; the pack's distribution depends on them."""

    @classmethod
    def of(cls, file: str, *shared: str) -> Sources:
        """The sources of a module's package: ``Sources.of(__file__)``."""
        return cls(directory=Path(file).parent / "native", shared=shared)

    def header(self, name: str) -> Path:
        """The file of a header, the pack's own first. Raises `MachineError` if there is none."""
        try:
            directories = [self.directory, *(Path(str(files(package))) for package in self.shared)]
        except ModuleNotFoundError as error:
            raise MachineError(
                f"{self.directory} includes headers of the package {error.name}, which is not installed. "
                f"Fix: pip install {str(error.name).replace('_', '-')}"
            ) from error
        for directory in directories:
            if (found := directory / "include" / name).is_file():
                return found
        raise MachineError(f"{self.directory} includes {name}, which is in none of {', '.join(map(str, directories))}")


def source_of(sources: Sources, name: str) -> str:
    """The source ``kernels/NAME.cu`` with its own headers inserted, each once: one text, which keys the cache."""
    seen: set[str] = set()

    def inlined(path: Path) -> str:
        def header(found: re.Match[str]) -> str:
            if found[1] in seen:
                return ""
            seen.add(found[1])
            return inlined(sources.header(found[1]))

        return _INCLUDE.sub(header, path.read_text(encoding="utf-8").replace("#pragma once\n", ""))

    return inlined(sources.directory / "kernels" / f"{name}.cu")


def names(sources: Sources) -> list[str]:
    """The names of the pack's sources."""
    return sorted(path.stem for path in (sources.directory / "kernels").glob("*.cu"))


def binary_name(sources: Sources, name: str, architecture: str, toolkit: str = "") -> str:
    """The file with the binary of the present source."""
    content = "\0".join((*FLAGS, architecture, toolkit, source_of(sources, name)))
    return f"{name}.{architecture}.{hashlib.sha256(content.encode()).hexdigest()[:16]}.cubin"


_assumed: ContextVar[tuple[int, int] | None] = ContextVar("surogate_assumed_gpu", default=None)


@contextmanager
def assuming(gpu: tuple[int, int]) -> Iterator[None]:
    """Inside, questions about the GPU are answered as on a machine with CuPy and a GPU of this compute capability.

    For a plan, which chooses kernels and launches none.
    """
    token = _assumed.set(gpu)
    try:
        yield
    finally:
        _assumed.reset(token)


def assumed() -> tuple[int, int] | None:
    """The compute capability of the assumed GPU, or None."""
    return _assumed.get()


def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) compute capability of the GPU, or of the assumed one."""
    import torch

    return assumed() or torch.cuda.get_device_capability(device)


def architecture_of(device: torch.device) -> str:
    """``sm_90a`` for a Hopper: the architecture-specific target where there is one."""
    major, minor = capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def missing_gpu(device: torch.device) -> str | None:
    """The reason why no CUDA kernel runs on the device, or None; for a pack's `unavailable`."""
    import torch

    if device.type != "cuda":
        return "it needs an NVIDIA GPU"
    if assumed() is not None:
        return None
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    return None


def missing_cupy() -> str | None:
    """What to install if CuPy is missing, or None; for a pack's `unavailable`."""
    import importlib.util

    import torch

    if assumed() is not None or importlib.util.find_spec("cupy") is not None:
        return None
    return f"CuPy is not installed: pip install cupy-cuda{(torch.version.cuda or '13').partition('.')[0]}x"


def _cache() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("surogate") / "kernels"


@cache
def _own_directory() -> TemporaryDirectory[str]:
    """A directory for this process only, if the user's cache cannot be written; deleted at its end."""
    return TemporaryDirectory(prefix="surogate-kernels-")


def _compiled(sources: Sources, name: str, architecture: str) -> Path:
    """The binary for an architecture-specific target, which CuPy itself does not request from NVRTC."""
    from cupy.cuda import nvrtc

    version = ".".join(map(str, nvrtc.getVersion()))
    try:
        directory = private_directory(_cache())
    except OSError:
        directory = Path(_own_directory().name)
    binary = directory / binary_name(sources, name, architecture, f"nvrtc {version}")
    if binary.exists():
        return binary
    program = nvrtc.createProgram(source_of(sources, name), f"{name}.cu", [], [])
    try:
        nvrtc.compileProgram(program, (*FLAGS, f"-arch={architecture}"))
        made: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise MachineError(
            f"NVRTC {version} does not compile the kernel {name} for {architecture}: {error}\n{log}\n"
            f"Fix: update CuPy and its CUDA packages, or train with another kernel pack."
        ) from error
    finally:
        nvrtc.destroyProgram(program)
    try:
        # Several processes and threads may do so at once; each writes a complete file.
        partial = binary.with_suffix(f".{os.getpid()}.{get_ident()}.partial")
        partial.write_bytes(made)
        partial.replace(binary)
    except OSError:
        binary = Path(_own_directory().name, binary.name)
        binary.write_bytes(made)
    return binary


class _Stream:
    """torch's stream by the CUDA stream protocol, which not every torch has."""

    def __init__(self, pointer: int):
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


class Module:
    """One source of a pack, loaded on first use, once per device.

    A `specific` source uses features that only the architecture's own target has, such as wgmma of sm_90a, or keeps
    subnormal numbers, which CuPy's own compilation flushes to zero (it adds ``-ftz=true``). It includes none of the
    toolkit's headers.
    """

    def __init__(self, sources: Sources, name: str, *, specific: bool = False):
        self.sources = sources
        self.name = name
        self.specific = specific
        self._functions: dict[tuple[int, str, int], Any] = {}
        self._loaded: dict[int, Any] = {}

    def _binary(self, device: torch.device) -> Path | None:
        """The compiled source, made now if it is `specific`; None if CuPy is to compile it."""
        architecture = architecture_of(device)
        binary = self.sources.directory / "build" / binary_name(self.sources, self.name, architecture)
        if binary.exists():
            return binary
        return _compiled(self.sources, self.name, architecture) if self.specific else None

    def _load(self, device: torch.device) -> Any:
        import cupy

        index = device.index or 0
        if index not in self._loaded:
            with cupy.cuda.Device(index):
                if (binary := self._binary(device)) is not None:
                    self._loaded[index] = cupy.RawModule(path=str(binary))
                else:
                    self._loaded[index] = cupy.RawModule(
                        code=source_of(self.sources, self.name), options=FLAGS, backend="nvrtc"
                    )
        return self._loaded[index]

    def compile(self, device: torch.device) -> None:
        """Compile for the device, unless that was done. Raises `MachineError` if NVRTC does not compile it."""
        import cupy

        if self._binary(device) is None:
            with cupy.cuda.Device(device.index or 0):
                self._load(device).compile()

    def _function(self, device: torch.device, name: str, shared: int) -> Any:
        key = device.index or 0, name, shared
        if key not in self._functions:
            function = self._load(device).get_function(name)
            if shared > 48 * 1024:
                function.max_dynamic_shared_size_bytes = shared
            self._functions[key] = function
        return self._functions[key]

    def launch(
        self,
        function: str,
        grid: Sequence[int],
        block: int,
        *arguments: Tensor | int | float | np.generic,
        shared: int = 0,
    ) -> None:
        """Launch on the current stream of the first tensor's device, without waiting and without copying.

        Tensors are passed as pointers; a Python int is a ``long long``, a float is a ``float``, a numpy
        scalar is itself. `shared` is in bytes of dynamic shared memory.
        """
        import torch

        from surogate_core.kernels.building import ahead

        device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
        if ahead.noted(self, device):
            return
        import cupy

        converted: list[Any] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                converted.append(argument.data_ptr())
            else:
                converted.append(np.float32(argument) if isinstance(argument, float) else argument)
        stream = _Stream(torch.cuda.current_stream(device).cuda_stream)
        with cupy.cuda.Device(device.index or 0), cupy.cuda.Stream.from_external(stream):
            self._function(device, function, shared)(tuple(grid), (block,), tuple(converted), shared_mem=shared)
