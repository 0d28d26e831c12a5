"""The pack without a GPU; with one, the kernels against the reference in float64 and against themselves.

`test_in_the_interpreter` runs this file in a process of its own where triton is installed and there is no GPU.
"""

from __future__ import annotations

import pytest
import surogate_kernels_triton
import torch

from surogate_core.service.kernels import TORCH_PACK, KernelTable
from surogate_testing.attention_suite import (
    BOUNDS,
    LAYERS,
    Attention,
    Layer,
    PackedAttention,
    against_reference,
    make,
    unread_keys,
)
from surogate_testing.fake_gpu import a_gpu_is_there
from surogate_testing.interpreter import INTERPRETED, run_interpreted, starts_interpreter

interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 is not set")


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


@starts_interpreter
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Attention:
    """The kernel for every size of heads."""
    from surogate_kernels_triton import attention

    monkeypatch.setattr(attention, "HEAD_SIZES", range(attention.WIDEST + 1))
    return attention.attention


SMALL = {
    name: layer
    for name, layer in LAYERS.items()
    if layer.window <= 70 and (layer.keys <= 128 or "everything" in name or layer.values)
}


@interpreted
@pytest.mark.parametrize("layer", SMALL.values(), ids=SMALL)
def test_layers_in_the_interpreter(attend: Attention, layer: Layer) -> None:
    """The interpreter multiplies no matrices in bf16."""
    assert layer.compared(attend, torch.float16, device="cpu") <= BOUNDS[torch.float16]


@interpreted
@pytest.mark.parametrize("keys", [64, 128, 256])
def test_plain_attention_in_the_interpreter(attend: Attention, keys: int) -> None:
    for borders in ([0, 170], [0, 1, 8, 71, 72, 169, 170], [0, 0, 4, 4, 100, 170, 170]):
        assert Layer(keys=keys).compared(attend, torch.float16, device="cpu", borders=borders) <= BOUNDS[torch.float16]


@interpreted
def test_what_no_window_reaches_is_not_read(attend: Attention) -> None:
    for keys in (64, 256):
        unread_keys(Layer(keys=keys, window=60), attend, torch.float16, "cpu")


def test_what_it_takes() -> None:
    pytest.importorskip("triton")
    from surogate_kernels_triton import attention

    def rows(features: int) -> torch.Tensor:
        return torch.empty(4, 2, features)

    assert attention.takes(rows(64), rows(64), rows(64), window=3)
    assert attention.takes(rows(192), rows(192), rows(128))
    assert not attention.takes(rows(20), rows(20), rows(20))
    assert not attention.takes(rows(576), rows(576), rows(512))
