"""The pack without a GPU; with one, the kernels against the reference in float64 and against themselves."""

from __future__ import annotations

import pytest
import surogate_kernels_hopper
import torch
from attention_suite import PackedAttention

from surogate_core.kernels.attention import TORCH_PACK
from surogate_core.kernels.registry import KernelTable


def test_it_is_not_for_a_cpu() -> None:
    pack = surogate_kernels_hopper.surogate_kernel_pack()
    cpu = torch.device("cpu")
    assert pack.name == "hopper"
    assert pack.unavailable(cpu) == "it needs an NVIDIA GPU"
    table = KernelTable.build(cpu, [TORCH_PACK, pack])
    assert all(kernel.name != "hopper" for kernel in table.kernels)
    assert table.choose("attention", torch.bfloat16).name == "torch-cpu"


@pytest.mark.parametrize(
    ("cuda", "available", "cupy", "capability", "reason"),
    [
        (None, True, True, (9, 0), "no NVIDIA GPU"),
        ("13.0", False, True, (9, 0), "no NVIDIA GPU"),
        ("13.0", True, False, (9, 0), "cupy-cuda13x"),
        ("13.0", True, True, (8, 9), "sm_89"),
        ("13.0", True, True, (10, 0), "sm_100"),
        ("13.0", True, True, (9, 0), None),
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
    answer = surogate_kernels_hopper.unavailable(torch.device("cuda"))
    assert answer is None if reason is None else answer is not None and reason in answer


def test_it_takes_heads_of_128_features_alone() -> None:
    (kernel,) = surogate_kernels_hopper.kernels()
    assert kernel.takes(torch.empty(4, 2, 128), None)
    assert not kernel.takes(torch.empty(4, 2, 64), None)


class TestAttention(PackedAttention):
    pack = surogate_kernels_hopper
