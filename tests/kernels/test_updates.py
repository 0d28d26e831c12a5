"""The reference of the optimizer step's op against the formulas in float64, and its bf16 masters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.bundles import ParamGroup
from surogate_core.kernels import updates
from surogate_core.kernels.registry import references
from surogate_core.kernels.rounding import write_master

BETA1, BETA2, EPSILON, DECAY, RATE, CLIP = 0.9, 0.999, 1e-8, 0.1, 1e-2, 0.7
LENGTH = 700


def make_group(dtype: torch.dtype, scale: float) -> ParamGroup:
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(LENGTH, generator=generator).to(dtype)
    grad = torch.randn(LENGTH, generator=generator) * scale
    seed = torch.tensor(-77, dtype=torch.int32) if dtype == torch.bfloat16 else None
    return ParamGroup(name="g", master=master, grad=grad, shapes={}, weight_decay=DECAY, seed=seed, number=3)


def update(group: ParamGroup, first: Tensor, second: Tensor, step: int, *, skip: float = 0.0) -> None:
    values = {"lr": RATE, "clip": CLIP, "skip": skip, "count": float(step)}
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    updates.adamw_update(first, second, group, beta1=BETA1, beta2=BETA2, epsilon=EPSILON, **tensors)


def test_every_op_is_tested() -> None:
    assert [n for n, k in references.items() if k.function.__module__ == updates.__name__] == ["adamw_update"]


@pytest.mark.parametrize("scale", [1.0, 1e12, 1e-12, 0.0], ids=["random", "huge", "tiny", "zero"])
def test_against_float64(scale: float) -> None:
    group = make_group(torch.float32, scale)
    first, second = torch.zeros(LENGTH), torch.zeros(LENGTH)
    for step in (1, 2, 3, 1000):
        p, g = group.master.double(), group.grad.double() * CLIP
        m = BETA1 * first.double() + (1 - BETA1) * g
        v = BETA2 * second.double() + (1 - BETA2) * g * g
        divisor = (v / (1 - BETA2**step)).sqrt() + EPSILON
        p = p * (1 - RATE * DECAY) - RATE * m / (1 - BETA1**step) / divisor
        kept = group.grad.clone()
        update(group, first, second, step)
        group.grad.copy_(kept)
        for found, wanted in zip((group.master, first, second), (p, m, v), strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("piece", [256, 1 << 24])
def test_narrow_masters(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """What fp32 masters would become, written by the core's rounding, however it is cut."""
    monkeypatch.setattr(updates, "PIECE", piece)
    narrow, wide, twin = (make_group(dtype, 1.0) for dtype in (torch.bfloat16, torch.float32, torch.bfloat16))
    wide.master.copy_(narrow.master)
    update(narrow, torch.zeros(LENGTH), torch.zeros(LENGTH), 1)
    update(wide, torch.zeros(LENGTH), torch.zeros(LENGTH), 1)
    write_master(twin, 0, wide.master)
    assert torch.equal(narrow.master, twin.master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_changes_nothing(dtype: torch.dtype) -> None:
    group = make_group(dtype, float("nan"))
    before = group.master.clone()
    first, second = torch.zeros(LENGTH), torch.zeros(LENGTH)
    update(group, first, second, 1, skip=1.0)
    assert torch.equal(group.master, before)
    assert not first.any()
    assert not second.any()
