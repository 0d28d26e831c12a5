"""Random initial values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from surogate_core.dsl.declare import TensorSpec
from surogate_core.engine.planning.pieces import RandomSource
from surogate_core.errors import PluginError

CPU = torch.device("cpu")
SPEC = TensorSpec(name="w", hf_name="a.weight", shape=(300, 200), trainable=True, role="weight", init="normal")


def draw(seed: int = 0, spec: TensorSpec = SPEC, std: float = 0.02) -> torch.Tensor:
    return RandomSource(seed=seed, std=std, device=CPU)(spec)


def test_random_values_depend_on_the_seed_and_the_name_alone() -> None:
    source = RandomSource(seed=0, std=0.02, device=CPU)
    source(replace(SPEC, hf_name="other"))
    torch.rand(7)
    assert torch.equal(source(SPEC), draw())
    assert not torch.equal(draw(1), draw())
    assert not torch.equal(draw(spec=replace(SPEC, hf_name="b.weight")), draw())


def test_random_values_have_the_spread_that_they_should() -> None:
    value = draw()
    count = value.numel()
    assert abs(value.mean()) < 4 * 0.02 / count**0.5
    assert value.std().item() == pytest.approx(0.02, rel=4 / (2 * count) ** 0.5)
    down = draw(spec=replace(SPEC, init="lora_a", role="adapter"))
    bound = 1 / SPEC.shape[1] ** 0.5
    assert 0.99 * bound < down.max() <= bound
    assert -bound <= down.min() < -0.99 * bound
    assert (draw(spec=replace(SPEC, init="ones")) == 1).all()
    assert (draw(spec=replace(SPEC, init="zeros")) == 0).all()


def test_a_function_makes_values_of_uniform_numbers() -> None:
    counted = draw(spec=replace(SPEC, init=lambda u: torch.arange(u.numel()).view(u.shape)))
    assert counted.dtype == torch.float32
    assert torch.equal(counted.view(-1), torch.arange(60_000.0))
    uniform = replace(SPEC, init=lambda u: u)
    value = draw(spec=uniform)
    assert value.min() >= 0
    assert value.max() < 1
    assert torch.equal(value, draw(spec=uniform))
    assert not torch.equal(value, draw(1, spec=uniform))
    assert not torch.equal(value, draw(spec=replace(uniform, hf_name="b.weight")))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda u: u[:2],
            r"family\.Block\.decay: the function of `init` returns shape \(2, 200\)\. Fix: .*\(300, 200\)",
        ),
        (lambda u: 1.0, "returns float. Fix"),
        (lambda u: u.log().fill_(math.nan), "returns NaN or infinity. Fix"),
        (lambda u: u @ u, "failed: RuntimeError"),
    ],
)
def test_a_function_that_gives_no_values_is_named(function: Callable[[torch.Tensor], Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        draw(spec=replace(SPEC, init=function, declared="family.Block.decay"))
