"""Sources compile for every architecture; what a binary is of."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from surogate_core.kernels import native

NATIVE = Path(__file__).resolve().parents[2] / "native"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("architecture", native.ARCHITECTURES)
@pytest.mark.parametrize("name", native.names(NATIVE))
def test_a_source_compiles_without_a_warning(tmp_path: Path, name: str, architecture: str) -> None:
    source = tmp_path / f"{name}.cu"
    source.write_text(native.source_of(NATIVE, name))
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
    assert native.names(tmp_path) == ["k"]
    lines = [line for line in native.source_of(tmp_path, "k").splitlines() if line]
    assert lines == ["#include <cuda_fp16.h>", "int b;", "int a;", "int k;"]
    before = native.binary_name(tmp_path, "k", "sm_90a")
    (tmp_path / "include" / "b.cuh").write_text("int other;\n")
    assert native.binary_name(tmp_path, "k", "sm_90a") != before


def test_the_architecture_is_the_most_specific(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, name in (((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 1), "sm_121a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert native.architecture_of(torch.device("cuda")) == name
        assert name in native.ARCHITECTURES
