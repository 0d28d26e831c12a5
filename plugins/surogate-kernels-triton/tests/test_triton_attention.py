"""The pack without a GPU; with one, the kernels against the reference in float64 and against themselves."""

from __future__ import annotations

import pytest
import surogate_kernels_triton
import torch

from surogate_core.kernels.registry import KernelTable
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing.attention_suite import BOUNDS, Attention, PackedAttention, against_reference, make
from surogate_testing.fake_gpu import a_gpu_is_there


def test_it_is_not_for_a_cpu() -> None:
    pack = surogate_kernels_triton.surogate_kernel_pack()
    cpu = torch.device("cpu")
    assert pack.name == "triton"
    assert pack.unavailable(cpu) == "it needs an NVIDIA GPU"
    table = KernelTable.build(cpu, [TORCH_PACK, pack])
    assert all(kernel.name != "triton" for kernel in table.kernels)
    assert table.choose("attention", torch.bfloat16).name == "torch-cpu"


@pytest.mark.parametrize(
    ("installed", "capability", "reason"),
    [(False, (9, 0), "triton is not installed"), (True, (7, 5), "sm_75"), (True, (8, 0), None)],
)
def test_what_a_gpu_must_have(
    monkeypatch: pytest.MonkeyPatch, installed: bool, capability: tuple[int, int], reason: str | None
) -> None:
    a_gpu_is_there(monkeypatch, capability=capability, packages=installed)
    answer = surogate_kernels_triton.unavailable(torch.device("cuda"))
    assert answer is None if reason is None else answer is not None and reason in answer


class TestAttention(PackedAttention):
    pack = surogate_kernels_triton

    features = (64, 128)
    dtypes = (torch.bfloat16, torch.float16)

    @pytest.mark.parametrize("features", [16, 80])
    def test_other_head_sizes_go_to_torch(self, attention: Attention, features: int) -> None:
        compared = against_reference(attention, make(300, (4, 2), features, torch.bfloat16), [0, 141, 300], 0.1)
        assert compared.error() <= BOUNDS[torch.bfloat16]
