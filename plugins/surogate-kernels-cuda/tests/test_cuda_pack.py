"""Which machine may use the pack."""

from __future__ import annotations

import pytest
import surogate_kernels_cuda
import torch

from surogate_core.service.kernels import TORCH_PACK, KernelTable
from surogate_testing.fake_gpu import a_gpu_is_there


def test_it_is_not_for_a_cpu() -> None:
    pack = surogate_kernels_cuda.surogate_kernel_pack()
    cpu = torch.device("cpu")
    assert pack.unavailable(cpu) == "it needs an NVIDIA GPU"
    table = KernelTable.build(cpu, [TORCH_PACK, pack])
    assert all(kernel.name != "cuda" for kernel in table.kernels)


@pytest.mark.parametrize(
    ("installed", "capability", "reason"),
    [(False, (9, 0), "cupy-cuda13x"), (True, (7, 5), "sm_75"), (True, (8, 0), None)],
)
def test_what_a_gpu_must_have(
    monkeypatch: pytest.MonkeyPatch, installed: bool, capability: tuple[int, int], reason: str | None
) -> None:
    a_gpu_is_there(monkeypatch, capability=capability, packages=installed)
    answer = surogate_kernels_cuda.unavailable(torch.device("cuda"))
    assert answer is None if reason is None else answer is not None and reason in answer
