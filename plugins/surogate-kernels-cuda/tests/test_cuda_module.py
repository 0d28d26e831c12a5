"""The sources compile for every architecture; which pack a machine may use; what a binary is of."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import surogate_kernels_cuda
import torch
from surogate_kernels_cuda import module

from surogate_core.kernels.attention import TORCH_PACK
from surogate_core.kernels.registry import KernelTable


def test_it_is_not_for_a_cpu() -> None:
    pack = surogate_kernels_cuda.surogate_kernel_pack()
    cpu = torch.device("cpu")
    assert pack.unavailable(cpu) == "it needs an NVIDIA GPU"
    table = KernelTable.build(cpu, [TORCH_PACK, pack])
    assert all(kernel.name != "cuda" for kernel in table.kernels)


@pytest.mark.parametrize(
    ("cuda", "available", "cupy", "capability", "reason"),
    [
        (None, True, True, (9, 0), "no NVIDIA GPU"),
        ("13.0", False, True, (9, 0), "no NVIDIA GPU"),
        ("13.0", True, False, (9, 0), "cupy-cuda13x"),
        ("13.0", True, True, (7, 5), "sm_75"),
        ("13.0", True, True, (8, 0), None),
    ],
)
def test_what_a_gpu_must_have(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    available: bool,
    cupy: bool,
    capability: tuple[int, int],
    reason: str | None,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if cupy else None)
    answer = surogate_kernels_cuda.unavailable(torch.device("cuda"))
    assert answer is None if reason is None else answer is not None and reason in answer


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("architecture", module.ARCHITECTURES)
@pytest.mark.parametrize("name", module.names())
def test_a_source_compiles_without_a_warning(tmp_path: Path, name: str, architecture: str) -> None:
    source = tmp_path / f"{name}.cu"
    source.write_text(module.source_of(name))
    command = ["nvcc", *module.FLAGS, f"-arch={architecture}", "-Werror=all-warnings", "-cubin", str(source)]
    result = subprocess.run([*command, "-o", str(tmp_path / "made")], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_source_is_one_text_and_names_its_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "a.cuh").write_text('#pragma once\n#include "b.cuh"\nint a;\n')
    (tmp_path / "include" / "b.cuh").write_text("#pragma once\n#include <cuda_fp16.h>\nint b;\n")
    (tmp_path / "kernels" / "k.cu").write_text('#include "b.cuh"\n#include "a.cuh"\nint k;\n')
    monkeypatch.setattr(module, "NATIVE", tmp_path)
    assert module.names() == ["k"]
    lines = [line for line in module.source_of("k").splitlines() if line]
    assert lines == ["#include <cuda_fp16.h>", "int b;", "int a;", "int k;"]
    before = module.binary_name("k", "sm_90a")
    (tmp_path / "include" / "b.cuh").write_text("int other;\n")
    assert module.binary_name("k", "sm_90a") != before


def test_the_architecture_is_the_most_specific(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, name in (((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 1), "sm_121a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert module.architecture_of(torch.device("cuda")) == name
        assert name in module.ARCHITECTURES
