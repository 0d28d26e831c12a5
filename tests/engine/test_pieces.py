"""Random initial values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from surogate_core.dsl.declare import TensorSpec
from surogate_core.engine.pieces import RandomSource

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
