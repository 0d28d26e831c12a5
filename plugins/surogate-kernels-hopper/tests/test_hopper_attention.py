"""The pack without a GPU; with one, the kernels against the reference in float64 and against themselves."""

from __future__ import annotations

from typing import ClassVar

import pytest
import surogate_kernels_hopper
import torch
from surogate_kernels_hopper import attention as op

from surogate_core.service.kernels import TORCH_PACK, KernelTable
from surogate_testing.attention_suite import BOUNDS, Attention, Layer, PackedAttention, borders_of, make, run
from surogate_testing.fake_gpu import a_gpu_is_there
from surogate_testing.op_cases import random


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


@pytest.mark.parametrize("features", [64, 128, 256])
def test_it_takes_heads_of_three_sizes(features: int) -> None:
    kernel = op.kernel()
    wide, other = torch.empty(4, 2, features), torch.empty(4, 2, features + 32)
    assert kernel.takes(wide, wide, wide)
    assert not kernel.takes(other, other, other)
    assert not kernel.takes(wide, wide, other)


def test_a_soft_cap_is_left_to_other_packs() -> None:
    assert op.kernel().knows == {"window", "sinks"}


@pytest.mark.parametrize(
    ("features", "longest", "window", "sinks", "kernel"),
    [
        (128, 4096, 0, False, "counted"),
        (128, 4097, 0, False, "long"),
        (128, 8192, 8191, False, "counted, window 8191"),
        (128, 8192, 0, True, "counted"),
        (64, 8192, 0, False, "counted"),
        (256, 8192, 0, False, "counted"),
    ],
)
def test_which_kernel_a_call_takes(
    monkeypatch: pytest.MonkeyPatch, features: int, longest: int, window: int, sinks: bool, kernel: str
) -> None:
    """The op hands on no window that holds every document."""
    chosen: list[str] = []

    def counted(*call: object, window: int, sinks: torch.Tensor | None) -> None:
        chosen.append("counted" + f", window {window}" * bool(window))

    monkeypatch.setattr(op, "_attention", counted)
    monkeypatch.setattr(op, "_attention_long", lambda *call: chosen.append("long"))
    q = torch.empty(4, 2, features)
    op.attention(q, q, q, torch.tensor([0, 4]), longest, 0.1, window=window, sinks=torch.ones(2) if sinks else None)
    assert chosen == [kernel]


LAYERS = {
    f"{keys}, window {window}{', sinks' * sinks}": Layer(keys=keys, window=window, sinks=sinks, heads=heads)
    for keys in (64, 128, 256)
    for window, sinks, heads in (
        (0, True, (4, 1)),
        (1, False, (4, 2)),
        (2, True, (2, 2)),
        (64, False, (8, 1)),
        (70, True, (4, 2)),
        (129, True, (4, 4)),
        (200, False, (4, 2)),
        (513, True, (2, 1)),
    )
}


class TestAttention(PackedAttention):
    pack = surogate_kernels_hopper
    features: ClassVar = (64, 128, 256)

    @pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
    def test_windows_and_sinks_of_every_size(self, attention: Attention, layer: Layer) -> None:
        """Documents end within tiles, and windows cross tiles and documents."""
        for borders in (None, [0, 1, 700, 700, 1999, 2000]):
            assert layer.compared(attention, torch.bfloat16, borders=borders) <= BOUNDS[torch.bfloat16], borders

    @pytest.mark.parametrize("features", [64, 256])
    def test_equal_bits_of_every_size(self, attention: Attention, features: int) -> None:
        tensors = [
            *make(4096, (16, 8), features, torch.bfloat16),
            random(4096, 16, features, seed=4, dtype=torch.bfloat16).cuda(),
        ]
        borders = borders_of([0, 1, 700, 2048, 2100, 4000, 4096, 4096])
        first = run(attention, tensors, borders)
        assert all(run(attention, tensors, borders) == first for _ in range(10))

    @pytest.mark.parametrize("borders", [[0, 3000], [0, 1, 700, 2999, 3000, 3000]], ids=["one", "several"])
    def test_long_documents_have_the_bits_of_short_ones(self, attention: Attention, borders: list[int]) -> None:
        """The kernel for long documents is another program for the same sums."""
        q, k, v = make(3000, (8, 2), 128, torch.bfloat16)
        short, long = (attention(q, k, v, borders_of(borders), longest, 0.1) for longest in (3000, op.SHORT + 1))
        assert torch.equal(short, long)
