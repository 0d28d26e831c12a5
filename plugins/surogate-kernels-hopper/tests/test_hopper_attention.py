"""The pack without a GPU; with one, the kernels against the reference in float64 and against themselves."""

from __future__ import annotations

import pytest
import surogate_kernels_hopper
import torch

from surogate_core.service.kernels import TORCH_PACK, KernelTable
from surogate_testing.attention_suite import PackedAttention
from surogate_testing.fake_gpu import a_gpu_is_there


def test_it_is_not_for_a_cpu() -> None:
    pack = surogate_kernels_hopper.surogate_kernel_pack()
    cpu = torch.device("cpu")
    assert pack.name == "hopper"
    assert pack.unavailable(cpu) == "it needs an NVIDIA GPU"
    table = KernelTable.build(cpu, [TORCH_PACK, pack])
    assert all(kernel.name != "hopper" for kernel in table.kernels)
    assert table.choose("attention", torch.bfloat16).name == "torch-cpu"


@pytest.mark.parametrize(
    ("installed", "capability", "reason"),
    [(False, (9, 0), "cupy-cuda13x"), (True, (8, 9), "sm_89"), (True, (10, 0), "sm_100"), (True, (9, 0), None)],
)
def test_what_a_gpu_must_have(
    monkeypatch: pytest.MonkeyPatch, installed: bool, capability: tuple[int, int], reason: str | None
) -> None:
    a_gpu_is_there(monkeypatch, capability=capability, packages=installed)
    answer = surogate_kernels_hopper.unavailable(torch.device("cuda"))
    assert answer is None if reason is None else answer is not None and reason in answer


def test_it_takes_heads_of_128_features_alone() -> None:
    (kernel,) = surogate_kernels_hopper.kernels()
    wide, narrow = torch.empty(4, 2, 128), torch.empty(4, 2, 64)
    assert kernel.takes(wide, wide, wide)
    assert not kernel.takes(narrow, narrow, narrow)
    assert not kernel.takes(wide, wide, narrow)


class TestAttention(PackedAttention):
    pack = surogate_kernels_hopper
