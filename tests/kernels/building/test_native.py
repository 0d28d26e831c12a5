"""Sources compile for every architecture; what a binary is of."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import ModuleType

import pytest
import torch
from _pytest.mark import ParameterSet

from surogate_core.errors import MachineError
from surogate_core.kernels.building import native

ROOT = Path(__file__).resolve().parents[3]
PACKS = {
    directory: native.Sources(directory=directory, shared=("surogate_native",))
    for directory in sorted(ROOT.glob("plugins/*/src/*/native"))
}
GATED = PACKS[ROOT / "plugins/surogate-kernels-cuda/src/surogate_kernels_cuda/native"]
"""The sources of a pack that includes shared headers."""
USUAL = "sm_90a"
"""The architecture that sources are compiled for in every run of the tests; `make test-slow` takes all others."""
SIBLINGS = (
    "attention_backward_64_sm90",
    "attention_backward_256_sm90",
    "attention_forward_64_sm90",
    "attention_forward_256_sm90",
)
"""Sources that are another source with another size of heads."""


def compilations() -> Iterator[ParameterSet]:
    """Every source for every architecture."""
    for sources in PACKS.values():
        for name in native.names(sources):
            for architecture in native.ARCHITECTURES:
                marks = () if architecture == USUAL else (pytest.mark.slow,)
                yield pytest.param(sources, name, architecture, id=f"{name}-{architecture}", marks=marks)


@pytest.mark.slow_cases(*SIBLINGS)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("sources", "name", "architecture"), list(compilations()))
def test_a_source_compiles_without_a_warning(
    tmp_path: Path, sources: native.Sources, name: str, architecture: str
) -> None:
    source = tmp_path / f"{name}.cu"
    source.write_text(native.source_of(sources, name))
    command = ["nvcc", *native.FLAGS, f"-arch={architecture}", "-Werror=all-warnings", "-Xptxas=-v"]
    command += ["-cubin", str(source), "-o", str(tmp_path / "made")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    # What ptxas only mentions: asynchronous products that it waits for one by one, registers that did not suffice.
    assert "Performance Loss" not in result.stderr
    assert all(int(count) <= 32 for count in re.findall(r"(\d+) bytes spill", result.stderr))


def test_a_source_is_one_text_and_names_its_binary(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "a.cuh").write_text('#pragma once\n#include "b.cuh"\nint a;\n')
    (tmp_path / "include" / "b.cuh").write_text("#pragma once\n#include <cuda_fp16.h>\nint b;\n")
    (tmp_path / "kernels" / "k.cu").write_text('#include "b.cuh"\n#include "a.cuh"\nint k;\n')
    sources = native.Sources(directory=tmp_path)
    assert native.names(sources) == ["k"]
    lines = [line for line in native.source_of(sources, "k").splitlines() if line]
    assert lines == ["#include <cuda_fp16.h>", "int b;", "int a;", "int k;"]
    before = native.binary_name(sources, "k", "sm_90a")
    (tmp_path / "include" / "b.cuh").write_text("int other;\n")
    assert native.binary_name(sources, "k", "sm_90a") != before


def test_a_header_is_the_packs_own_or_a_named_packages(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "k.cu").write_text('#include "skinny.cuh"\n')
    shared = native.Sources(directory=tmp_path, shared=("surogate_native",))
    assert "namespace surogate" in native.source_of(shared, "k")
    with pytest.raises(MachineError, match=r"includes skinny\.cuh, which is in none of"):
        native.source_of(native.Sources(directory=tmp_path), "k")
    with pytest.raises(MachineError, match=r"no_such_pack, which is not installed\. Fix: pip install no-such-pack"):
        native.source_of(native.Sources(directory=tmp_path, shared=("no_such_pack",)), "k")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "skinny.cuh").write_text("int own;\n")
    assert native.source_of(shared, "k").split() == ["int", "own;"]


def test_every_shared_header_has_more_than_one_reader() -> None:
    """A header that one pack includes is in that pack."""
    headers = {path.name for path in (ROOT / "native/src/surogate_native/include").iterdir()}
    readers = {name: set[Path]() for name in headers}

    def enter(text: str, pack: Path) -> None:
        for name in re.findall(r'#include "([^"]+)"', text):
            if name in headers:
                readers[name].add(pack)
                enter(PACKS[pack].header(name).read_text(), pack)

    for pack in PACKS:
        for file in (*pack.glob("kernels/*.cu"), *pack.glob("include/*.cuh")):
            enter(file.read_text(), pack)
    assert {name for name, packs in readers.items() if len(packs) < 2} == set()


def test_the_architecture_is_the_most_specific(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, name in (((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 1), "sm_121a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert native.architecture_of(torch.device("cuda")) == name
        assert name in native.ARCHITECTURES


class FakeNvrtc(ModuleType):
    """As much of `cupy.cuda.nvrtc` as is used; remembers what it was asked to compile."""

    NVRTCError = type("NVRTCError", (Exception,), {})

    def __init__(self, *, refuses: bool = False):
        super().__init__("cupy.cuda.nvrtc")
        self.refuses, self.compiled, self.open = refuses, list[tuple[str, ...]](), 0
        # NVRTC's own names, which are not Python's.
        self.__dict__.update(
            {
                "getVersion": lambda: (13, 0),
                "createProgram": self._create,
                "compileProgram": self._compile,
                "getCUBIN": lambda program: b"cubin",
                "getProgramLog": lambda program: "line 3: no such thing",
                "destroyProgram": self._destroy,
            }
        )

    def _create(self, source: str, name: str, headers: list[str], includes: list[str]) -> int:
        self.open += 1
        return self.open

    def _compile(self, program: int, options: tuple[str, ...]) -> None:
        self.compiled.append(options)
        if self.refuses:
            raise self.NVRTCError("error 6")

    def _destroy(self, program: int) -> None:
        self.open -= 1


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvrtc:
    fake = FakeNvrtc()
    cuda = ModuleType("cupy.cuda")
    cuda.nvrtc = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(native, "_cache", lambda: tmp_path / "cache" / "kernels")
    return fake


def test_a_binary_is_compiled_once_for_its_own_target(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    made = native._compiled(GATED, "gated_backward", "sm_90a")
    assert made.read_bytes() == b"cubin"
    assert made.parent == tmp_path / "cache" / "kernels"
    assert native._compiled(GATED, "gated_backward", "sm_90a") == made
    assert nvrtc.compiled == [(*native.FLAGS, "-arch=sm_90a")]
    assert native._compiled(GATED, "gated_backward", "sm_80") != made
    assert len(nvrtc.compiled) == 2
    assert not nvrtc.open
    assert sorted(path.suffix for path in made.parent.iterdir()) == [".cubin", ".cubin"]


def test_threads_that_compile_one_source_write_complete_files(
    nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have written before one of them gives its file the final name."""
    write, both = Path.write_bytes, Barrier(2, timeout=60)

    def written(path: Path, made: bytes) -> int:
        count = write(path, made)
        if path.suffix == ".partial":
            both.wait()
        return count

    monkeypatch.setattr(Path, "write_bytes", written)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: native._compiled(GATED, "gated_backward", "sm_90a"), range(2))
    assert one == other, "a thread whose file was taken away writes another one"


def test_a_cache_that_cannot_be_written_is_done_without(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    made = native._compiled(GATED, "gated_backward", "sm_90a")
    assert made.read_bytes() == b"cubin"
    assert tmp_path not in made.parents


def test_a_cache_that_everyone_may_write_to_is_not_used(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    planted = native._compiled(GATED, "gated_backward", "sm_90a")
    planted.write_bytes(b"planted")
    planted.parent.chmod(0o777)
    made = native._compiled(GATED, "gated_backward", "sm_90a")
    assert made.read_bytes() == b"cubin"
    assert tmp_path not in made.parents


def test_what_nvrtc_refuses_is_said_with_its_log(nvrtc: FakeNvrtc) -> None:
    nvrtc.refuses = True
    with pytest.raises(MachineError, match=r"(?s)gated_backward for sm_90a: error 6.line 3.*Fix: update CuPy"):
        native._compiled(GATED, "gated_backward", "sm_90a")
    assert not nvrtc.open


@pytest.mark.parametrize(
    ("device", "cuda", "available", "reason"),
    [
        ("cpu", "13.0", True, "it needs an NVIDIA GPU"),
        ("cuda", None, True, "torch finds no NVIDIA GPU"),
        ("cuda", "13.0", False, "torch finds no NVIDIA GPU"),
        ("cuda", "13.0", True, None),
    ],
)
def test_what_a_cuda_kernel_needs(
    monkeypatch: pytest.MonkeyPatch, device: str, cuda: str | None, available: bool, reason: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert native.missing_gpu(torch.device(device)) == reason


@pytest.mark.parametrize(("cuda", "package"), [("13.0", "cupy-cuda13x"), ("12.8", "cupy-cuda12x")])
def test_the_cupy_of_torchs_cuda_is_named(monkeypatch: pytest.MonkeyPatch, cuda: str, package: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert native.missing_cupy() == f"CuPy is not installed: pip install {package}"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert native.missing_cupy() is None
