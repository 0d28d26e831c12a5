"""The references of the optimizer steps' ops against the formulas in float64, and their bf16 masters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.bundles import ParamGroup
from surogate_core.kernels.optimizing import updates
from surogate_core.kernels.optimizing.rounding import write_master
from surogate_core.kernels.registry import references

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
    assert [n for n, k in references.items() if k.function.__module__ == updates.__name__] == [
        "adamw_update",
        "matrix_momentum",
        "matrix_update",
    ]


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


# --------------------------------------------------------------------------------- matrices

SHAPE = (5, 12)
OFFSETS = (0, 128, 512)


def make_matrices(dtype: torch.dtype) -> tuple[ParamGroup, updates.Matrices]:
    group = make_group(dtype, 1.0)
    return group, updates.Matrices.of(group, OFFSETS, SHAPE)


def test_momentum_against_float64() -> None:
    group, matrices = make_matrices(torch.float32)
    matrices.grads[1][2, 3], matrices.grads[2][0, 0] = float("nan"), float("inf")
    momentum = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(1))
    grad = torch.stack(matrices.grads).double()
    grad = torch.where(grad.isfinite(), CLIP * grad, 0.0)
    expected = 0.95 * momentum.double() + 0.05 * grad
    kept = group.grad.clone()
    updates.matrix_momentum(momentum, matrices, clip=torch.tensor(CLIP), skip=torch.tensor(0.0), beta=0.95)
    torch.testing.assert_close(momentum.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(group.grad, kept, equal_nan=True)
    before = momentum.clone()
    updates.matrix_momentum(momentum, matrices, clip=torch.tensor(torch.nan), skip=torch.tensor(1.0), beta=0.95)
    assert torch.equal(momentum, before)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cautious", [False, True])
def test_matrices_against_float64(cautious: bool, transposed: bool) -> None:
    group, matrices = make_matrices(torch.float32)
    generator = torch.Generator().manual_seed(2)
    o = torch.randn(3, *(SHAPE[::-1] if transposed else SHAPE), generator=generator).bfloat16()
    o = o.mT if transposed else o
    o[0, 0, 0] = 0
    factor = torch.rand(3, SHAPE[0], generator=generator)
    before = group.master.clone()
    w = torch.stack(matrices.masters).double()
    decay = torch.where(o * w >= 0, w, 0) if cautious else w
    expected = w - RATE * (factor[:, :, None].double() * o + DECAY * decay)
    updates.matrix_update(o, factor, matrices, lr=torch.tensor(RATE), weight_decay=DECAY, cautious=cautious)
    torch.testing.assert_close(torch.stack(matrices.masters).double(), expected, rtol=1e-6, atol=1e-7)
    changed = (group.master != before).nonzero().flatten()
    inside = torch.cat([torch.arange(at, at + 60) for at in OFFSETS])
    assert set(changed.tolist()) <= set(inside.tolist())
    before = group.master.clone()
    updates.matrix_update(o, factor, matrices, lr=torch.tensor(0.0), weight_decay=DECAY, cautious=cautious)
    assert torch.equal(group.master, before)


def test_narrow_matrices() -> None:
    """What fp32 masters would become, written by the core's rounding."""
    (narrow, matrices), (wide, others) = make_matrices(torch.bfloat16), make_matrices(torch.float32)
    wide.master.copy_(narrow.master)
    o = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(2)).bfloat16()
    for some in (matrices, others):
        rate = torch.tensor(RATE)
        updates.matrix_update(o, torch.ones(3, SHAPE[0]), some, lr=rate, weight_decay=DECAY, cautious=True)
    twin = make_group(torch.bfloat16, 1.0)
    for at in OFFSETS:
        write_master(twin, at, wide.master[at : at + 60])
    assert torch.equal(narrow.master, twin.master)
