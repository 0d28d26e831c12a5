"""Optimizer steps with a GPU: against the formulas in float64, and bf16 masters against the core's rounding."""

from __future__ import annotations

import pytest
import surogate_kernels_triton
import torch
from torch import Tensor

from surogate_core.plugin import bundles, compute
from surogate_core.service.kernels import updates, write_master

pytestmark = pytest.mark.gpu
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.1


def find(op: str = "adamw_update") -> object:
    if reason := surogate_kernels_triton.unavailable(torch.device("cuda")):
        pytest.skip(reason)
    return next(k.function for k in surogate_kernels_triton.kernels() if k.op == op)


def make_group(length: int, dtype: torch.dtype, scale: float) -> bundles.ParamGroup:
    generator = torch.Generator("cuda").manual_seed(length)
    master = torch.randn(length, generator=generator, device="cuda").to(dtype)
    grad = torch.randn(length, generator=generator, device="cuda") * scale
    seed = torch.tensor(-77, dtype=torch.int32, device="cuda") if dtype == torch.bfloat16 else None
    return bundles.ParamGroup(name="g", master=master, grad=grad, shapes={}, weight_decay=DECAY, seed=seed, number=3)


def update(
    function: object, group: bundles.ParamGroup, first: Tensor, second: Tensor, step: int, **figures: float
) -> None:
    values = {"lr": 1e-2, "clip": 0.7, "skip": 0.0, "count": float(step)} | figures
    tensors = {name: torch.tensor(value, device="cuda") for name, value in values.items()}
    assert callable(function)
    function(first, second, group, beta1=BETA1, beta2=BETA2, epsilon=EPSILON, **tensors)


def exact(group: bundles.ParamGroup, first: Tensor, second: Tensor, step: int) -> list[Tensor]:
    """Master, first and second in float64."""
    p, g = group.master.double(), group.grad.double() * 0.7
    m = BETA1 * first.double() + (1 - BETA1) * g
    v = BETA2 * second.double() + (1 - BETA2) * g * g
    mhat, vhat = m / (1 - BETA1**step), v / (1 - BETA2**step)
    return [p * (1 - 1e-2 * DECAY) - 1e-2 * mhat / (vhat.sqrt() + EPSILON), m, v]


@pytest.mark.parametrize("scale", [1.0, 1e12, 1e-12, 0.0], ids=["random", "huge", "tiny", "zero"])
@pytest.mark.parametrize("length", [256, 2048 * 3, 2048 * 5 + 256, 7])
def test_steps_against_float64(length: int, scale: float) -> None:
    group = make_group(length, torch.float32, scale)
    first, second = (torch.zeros(length, device="cuda") for _ in "mv")
    for step in (1, 2, 3, 1000):
        expected = exact(group, first, second, step)
        update(find(), group, first, second, step)
        for found, wanted in zip((group.master, first, second), expected, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-7)


def test_a_skipped_step_changes_nothing() -> None:
    group = make_group(5000, torch.float32, float("nan"))
    first, second = (torch.rand(5000, device="cuda") for _ in "mv")
    before = [t.clone() for t in (group.master, first, second)]
    update(find(), group, first, second, 2, skip=1.0, clip=float("nan"))
    for found, wanted in zip((group.master, first, second), before, strict=True):
        assert torch.equal(found, wanted)


def test_a_nan_stays_with_its_element() -> None:
    group = make_group(300, torch.float32, 1.0)
    group.grad[17] = float("nan")
    first, second = (torch.zeros(300, device="cuda") for _ in "mv")
    update(find(), group, first, second, 1)
    for tensor in (group.master, first, second):
        assert tensor.isnan().nonzero().flatten().tolist() == [17]


def test_narrow_masters_are_rounded_by_the_cores_bits() -> None:
    """An update in fp32 of the widened masters, then `write_master`, gives the same bits."""
    narrow = make_group(2048 * 4 + 256, torch.bfloat16, 1.0)
    wide = make_group(2048 * 4 + 256, torch.float32, 1.0)
    wide.master.copy_(narrow.master)
    twin = make_group(2048 * 4 + 256, torch.bfloat16, 1.0)
    first, second = (torch.zeros(narrow.master.numel(), device="cuda") for _ in "mv")
    moments = first.clone(), second.clone()
    update(find(), narrow, first, second, 1)
    update(find(), wide, *moments, 1)
    write_master(twin, 0, wide.master)
    assert torch.equal(narrow.master, twin.master)
    assert (narrow.master != wide.master.bfloat16()).float().mean() > 0.1


def test_the_reference_agrees() -> None:
    ours, theirs = (make_group(4096, torch.float32, 1.0) for _ in range(2))
    states = [[torch.zeros(4096, device="cuda") for _ in "mv"] for _ in range(2)]
    for step in range(1, 20):
        # torch's kernel leaves the gradients scaled by the clip.
        theirs.grad.copy_(ours.grad)
        update(find(), ours, *states[0], step)
        update(compute.adamw_update, theirs, *states[1], step)
    torch.testing.assert_close(ours.master, theirs.master, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------- matrices


def make_matrices(shape: tuple[int, int], dtype: torch.dtype) -> tuple[bundles.ParamGroup, updates.Matrices]:
    """Three matrices with room between them."""
    room = -(-shape[0] * shape[1] // 256) * 256 + 256
    group = make_group(3 * room, dtype, 1.0)
    return group, updates.Matrices.of(group, [0, room, 2 * room], shape)


SHAPES = [(64, 64), (65, 130), (1, 7), (200, 24)]


@pytest.mark.parametrize("shape", SHAPES)
def test_momentum_of_matrices(shape: tuple[int, int]) -> None:
    function = find("matrix_momentum")
    assert callable(function)
    _, matrices = make_matrices(shape, torch.float32)
    matrices.grads[1][0, 3], matrices.grads[2][0, 0] = float("nan"), float("inf")
    momentum = torch.randn(3, *shape, device="cuda")
    expected = momentum.clone()
    figures = {"clip": torch.tensor(0.7, device="cuda"), "skip": torch.tensor(0.0, device="cuda")}
    function(momentum, matrices, beta=0.95, **figures)
    updates.matrix_momentum(expected, matrices, beta=0.95, **figures)
    torch.testing.assert_close(momentum, expected, rtol=1e-6, atol=1e-7)
    before = momentum.clone()
    function(momentum, matrices, beta=0.95, clip=figures["clip"] * torch.nan, skip=torch.ones_like(figures["skip"]))
    assert torch.equal(momentum, before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cautious", [False, True])
def test_update_of_matrices(cautious: bool, transposed: bool, shape: tuple[int, int]) -> None:
    function = find("matrix_update")
    assert callable(function)
    generator = torch.Generator("cuda").manual_seed(5)
    o = torch.randn(3, *(shape[::-1] if transposed else shape), generator=generator, device="cuda").bfloat16()
    o = o.mT if transposed else o
    o[0, 0, 0] = 0
    factor = torch.rand(3, shape[0], generator=generator, device="cuda")
    rate = torch.tensor(1e-2, device="cuda")
    (group, matrices), (twin, others) = make_matrices(shape, torch.float32), make_matrices(shape, torch.float32)
    function(o, factor, matrices, lr=rate, weight_decay=DECAY, cautious=cautious)
    updates.matrix_update(o, factor, others, lr=rate, weight_decay=DECAY, cautious=cautious)
    torch.testing.assert_close(group.master, twin.master, rtol=1e-6, atol=1e-7)
    before = group.master.clone()
    function(o, factor, matrices, lr=rate * 0, weight_decay=DECAY, cautious=cautious)
    assert torch.equal(group.master, before)
    # bf16 masters have the bits that the core rounds with: all but those whose sum has another last digit are equal.
    (narrow, matrices), (wide, others) = make_matrices(shape, torch.bfloat16), make_matrices(shape, torch.bfloat16)
    start = narrow.master.clone()
    function(o, factor, matrices, lr=rate, weight_decay=DECAY, cautious=cautious)
    updates.matrix_update(o, factor, others, lr=rate, weight_decay=DECAY, cautious=cautious)
    assert (narrow.master != wide.master).float().mean() < 1e-3
    assert (narrow.master != start).any()
