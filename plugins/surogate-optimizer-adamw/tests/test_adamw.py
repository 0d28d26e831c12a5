"""Against torch.optim.AdamW over many steps; skipped steps, clipping, state."""

from __future__ import annotations

import math

import pytest
import torch
from surogate_optimizer_adamw import AdamWOptions, surogate_optimizer
from surogate_optimizer_adamw.adamw import AdamW
from torch import Tensor

from surogate_core.plugin import bundles

SHAPES = {"decayed": ((17, 9), (64,)), "undecayed": ((33,),)}
DECAY = {"decayed": 0.1, "undecayed": 0.0}


def make_groups(seed: int = 0) -> list[bundles.ParamGroup]:
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for name, members in SHAPES.items():
        shapes, offset = {}, 0
        for number, shape in enumerate(members):
            shapes[f"{name}.{number}"] = (offset, shape)
            offset += math.prod(shape)
        groups.append(
            bundles.ParamGroup(
                name=name,
                master=torch.randn(offset, generator=generator),
                grad=torch.zeros(offset),
                shapes=shapes,
                weight_decay=DECAY[name],
            )
        )
    return groups


def set_gradients(groups: list[bundles.ParamGroup], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for group in groups:
        # Six orders of magnitude, and a tenth of exact zeros.
        scale = 10 ** (6 * torch.rand(group.grad.shape, generator=generator) - 5)
        keep = torch.rand(group.grad.shape, generator=generator) > 0.1
        group.grad.copy_(torch.randn(group.grad.shape, generator=generator) * scale * keep)


def step(optimizer: AdamW, lr: float, clip: float = 1.0, skip: float = 0.0) -> None:
    optimizer.step(lr=torch.tensor(lr), clip=torch.tensor(clip), skip=torch.tensor(skip))


def snapshot(optimizer: AdamW) -> dict[str, Tensor]:
    masters = {f"master {g.name}": g.master.clone() for g in optimizer.groups}
    return {**masters, **{name: t.clone() for name, t in optimizer.state().items()}}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("clip", [1.0, 0.25])
def test_fifty_steps_equal_torch(clip: float) -> None:
    """0.25 is a power of two, so that the two ways to scale a gradient round alike."""
    options = AdamWOptions(beta1=0.85, beta2=0.97, epsilon=1e-7)
    groups = make_groups()
    optimizer = AdamW(groups, options)
    twins = [torch.nn.Parameter(g.master.clone()) for g in groups]
    reference = torch.optim.AdamW(
        [{"params": [p], "weight_decay": g.weight_decay} for p, g in zip(twins, groups, strict=True)],
        betas=(0.85, 0.97),
        eps=1e-7,
        foreach=False,
    )
    for number in range(50):
        lr = 1e-2 * (1 + math.cos(number / 16)) / 2
        set_gradients(groups, number)
        for twin, group in zip(twins, groups, strict=True):
            twin.grad = group.grad * clip
        for settings_of in reference.param_groups:
            settings_of["lr"] = lr
        reference.step()
        step(optimizer, lr, clip)
    for twin, group in zip(twins, groups, strict=True):
        # A few units in the last place: the fused kernel orders the same operations differently.
        torch.testing.assert_close(group.master, twin.detach(), rtol=2e-6, atol=2e-7)
        moments = reference.state[twin]
        torch.testing.assert_close(optimizer.state()[f"{group.name}.first"], moments["exp_avg"], rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(
            optimizer.state()[f"{group.name}.second"], moments["exp_avg_sq"], rtol=1e-5, atol=1e-12
        )
    assert optimizer.state()["steps"].item() == 50


def test_decay_reaches_only_its_group() -> None:
    groups = make_groups()
    before = [g.master.clone() for g in groups]
    step(AdamW(groups, AdamWOptions()), lr=0.1)
    torch.testing.assert_close(groups[0].master, before[0] * (1 - 0.1 * 0.1))
    assert torch.equal(groups[1].master, before[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("done", [0, 3], ids=["at the first step", "later"])
def test_a_skipped_step_changes_nothing(bad: float, done: int) -> None:
    groups = make_groups()
    optimizer = AdamW(groups, AdamWOptions())
    for number in range(done):
        set_gradients(groups, number)
        step(optimizer, 1e-2)
    before = snapshot(optimizer)
    set_gradients(groups, 7)
    groups[0].grad[5] = bad
    step(optimizer, 1e-2, clip=bad, skip=1.0)
    assert_equal(snapshot(optimizer), before)
    # And the next good step is as if the bad one had not been.
    set_gradients(groups, 8)
    step(optimizer, 1e-2)
    twins = make_groups()
    twin = AdamW(twins, AdamWOptions())
    for number in [*range(done), 8]:
        set_gradients(twins, number)
        step(twin, 1e-2)
    assert_equal(snapshot(optimizer), snapshot(twin))


def test_state_goes_into_another_optimizer_and_continues_bit_for_bit() -> None:
    groups = make_groups()
    optimizer = AdamW(groups, AdamWOptions())
    for number in range(5):
        set_gradients(groups, number)
        step(optimizer, 1e-2)
    others = make_groups(seed=9)
    other = AdamW(others, AdamWOptions())
    for group, mine in zip(others, groups, strict=True):
        group.master.copy_(mine.master)
    for name, tensor in other.state().items():
        tensor.copy_(optimizer.state()[name].clone())
    for number in range(5, 8):
        for some, that in ((groups, optimizer), (others, other)):
            set_gradients(some, number)
            step(that, 1e-2)
    assert_equal(snapshot(other), snapshot(optimizer))


def test_state_is_what_the_plan_is_told() -> None:
    groups = make_groups()
    optimizer = AdamW(groups, AdamWOptions())
    count = sum(g.master.numel() for g in groups)
    spec = surogate_optimizer()
    assert spec.name == "adamw"
    state_bytes = sum(t.nbytes for t in optimizer.state().values())
    assert state_bytes == pytest.approx(spec.state_bytes_per_parameter * count, abs=4)
