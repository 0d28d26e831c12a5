"""Experts under the recipes that round: training, recomputing, frozen weights that are packed, plain layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import surogate_recipe_fp8
import surogate_recipe_nvfp4
from mixture import CONFIG, Mixture
from surogate_offload_host import surogate_offloader
from torch import Tensor

from surogate_core.bundles import Recipe
from surogate_core.engine.engine import Engine
from surogate_testing import tiny
from surogate_testing.recipes import built

RECIPES = {
    "fp8-hybrid": built(surogate_recipe_fp8.surogate_recipe(), tiny.CPU),
    "nvfp4": built(surogate_recipe_nvfp4.surogate_recipe(), tiny.CPU),
}
NEAR = {"fp8-hybrid": 0.05, "nvfp4": 0.15}
"""Largest relative difference of a loss to that of plain products."""
MODES = {"full": None, "lora": tiny.lora(dropout=0.1)}
NAME = "layers.1.experts.{e}.down_proj.weight"
SLOW = (("fp8-hybrid", "full"), ("nvfp4", "full"), ("nvfp4", "lora"))
each = pytest.mark.parametrize(
    ("name", "mode"), [("fp8-hybrid", "lora"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)


def engine(recipe: Recipe, mode: str, **changes: Any) -> Engine:
    return tiny.engine(CONFIG, build=Mixture, recipe=recipe, lora=MODES[mode], optimizer=tiny.ADAMW, **changes)


@cache
def trained(name: str, mode: str) -> tuple[Engine, list[float], dict[str, Tensor]]:
    made = engine(RECIPES[name], mode)
    losses = tiny.train(made, 3, lr=1e-2)
    return made, losses, tiny.snapshot(made)


@each
def test_losses_are_near_those_of_plain_products(name: str, mode: str) -> None:
    found, wanted = trained(name, mode)[1], tiny.train(engine(tiny.PLAIN, mode), 3, lr=1e-2)
    assert found != wanted
    assert found == pytest.approx(wanted, rel=NEAR[name])


@each
def test_recomputing_changes_no_bit(name: str, mode: str) -> None:
    """And thus a repetition does not either."""
    made = engine(RECIPES[name], mode, recompute=True)
    assert tiny.train(made, 3, lr=1e-2) == trained(name, mode)[1]
    tiny.ensure_same_bits(tiny.snapshot(made), trained(name, mode)[2], "recomputed")


@pytest.mark.parametrize("name", ["fp8-hybrid", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_frozen_experts_are_kept_packed_but_in_plain_layers(name: str) -> None:
    packed = trained(name, "lora")[0].parameters.packed
    size, scales = 6 * 32 * 24, 4 * 6 * (32 + 24)
    assert packed[NAME].nbytes <= (2 * size + scales + 128 if name == "fp8-hybrid" else size)
    plain = engine(RECIPES[name], "lora", plain_last=1).parameters.packed
    assert NAME not in plain
    assert "layers.0.up_proj.weight" in plain


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["weights", "experts"])
@pytest.mark.parametrize("name", RECIPES)
def test_packed_experts_in_host_memory_change_no_bit(name: str, apart: bool) -> None:
    host = replace(surogate_offloader(), kinds=frozenset({"weights"}))
    made = engine(RECIPES[name], "lora", offloader=host, offload_experts=apart)
    assert tiny.train(made, 3, lr=1e-2) == trained(name, "lora")[1]
    tiny.ensure_same_bits(tiny.snapshot(made), trained(name, "lora")[2], "in host memory")


def test_plain_layers_multiply_experts_plainly() -> None:
    made = engine(RECIPES["fp8-hybrid"], "full", plain_first=2)
    assert not made.parameters.packed
    assert tiny.train(made, 2) == tiny.train(engine(tiny.PLAIN, "full"), 2)
