"""The six products: operands rounded to their formats, sums in float64 of them, what saturates; training with them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from surogate_recipe_bf16 import surogate_recipe
from surogate_recipe_bf16.gemm import COMBINATIONS, DTYPES, RoundedOperands, round_to
from torch import Tensor

from surogate_core.plugin import bundles, dsl
from surogate_testing import tiny

SLOT = dsl.TracedSlot(
    name="q", module="self_attn.q_proj", inputs=96, outputs=40, bias=False, region="qkv", adapter=None, index=0
)
CPU = torch.device("cpu")
MODEL = {"fp32": torch.float32, "bf16": torch.bfloat16}
BOUNDS = {"fp32": 1e-6, "bf16": 2**-8}
"""Of the sum of the rounded operands, in norm: what the model's dtype adds."""
EVERY = [
    (matmul, gradient, model)
    for model in ("fp32", "bf16")
    for matmul in ("fp32", "bf16", "e4m3")
    for gradient in ("fp32", "bf16", "e5m2")
    if {(matmul, matmul, model), ("e4m3" if gradient == "e5m2" else gradient, gradient, model)} <= COMBINATIONS
]


def built(matmul: str | None, gradient: str | None, model: Any) -> bundles.Recipe:
    spec = surogate_recipe()
    options = spec.options(matmul_dtype=matmul, gradient_dtype=gradient)
    recipe = spec.build(options, bundles.RecipeContext(device=CPU, dtype=model))
    assert recipe.plain == (recipe.note is None) == (not isinstance(recipe, RoundedOperands))
    return recipe


def nearest(x: Tensor, dtype: str) -> Tensor:
    """In float64, to the nearest of the format's finite values; on a tie to the one with the even code."""
    if dtype in ("fp32", "bf16"):
        return x.to(DTYPES[dtype]).double()
    codes = torch.arange(256).to(torch.uint8)
    values = codes.view(DTYPES[dtype]).double()
    codes, values = codes[values.isfinite()], values[values.isfinite()]
    # Even codes first: of two values that are as near the first is taken.
    order = torch.argsort(codes % 2, stable=True)
    values = values[order]
    return values[(x.double().flatten()[:, None] - values).abs().argmin(dim=1)].view(x.shape)


@pytest.mark.parametrize(("matmul", "gradient", "model"), EVERY)
def test_products_are_those_of_the_rounded_operands(matmul: str, gradient: str, model: str) -> None:
    recipe = built(matmul, gradient, model)
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        (torch.randn(shape, generator=generator) * scale).to(MODEL[model])
        for shape, scale in (((33, 96), 3.0), ((40, 96), 0.1), ((33, 40), 0.01))
    )
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = recipe.linear(x_leaf, w_leaf, SLOT)
    y.backward(dy)
    assert x_leaf.grad is not None
    assert w_leaf.grad is not None
    assert y.dtype == x_leaf.grad.dtype == w_leaf.grad.dtype == MODEL[model]
    beside = "e4m3" if gradient == "e5m2" else gradient
    dy_wide = nearest(dy, gradient)
    assert tiny.relative_error(y, nearest(x, matmul) @ nearest(w, matmul).t()) <= BOUNDS[model]
    assert tiny.relative_error(x_leaf.grad, dy_wide @ nearest(w, beside)) <= BOUNDS[model]
    assert tiny.relative_error(w_leaf.grad, dy_wide.t() @ nearest(x, beside)) <= BOUNDS[model]


def test_the_combinations_are_six_and_each_is_used() -> None:
    used = set()
    for matmul, gradient, model in EVERY:
        used |= {(matmul, matmul, model), ("e4m3" if gradient == "e5m2" else gradient, gradient, model)}
    assert used == COMBINATIONS
    assert len(COMBINATIONS) == 6


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None, "fp32"), None),
        ((None, None, "bf16"), None),
        (("fp32", None, "fp32"), None),
        (("bf16", "bf16", "bf16"), None),
        (("bf16", None, "fp32"), ("bf16", "bf16")),
        (("e4m3", None, "fp32"), ("e4m3", "bf16")),
        (("e4m3", None, "bf16"), ("e4m3", "bf16")),
        ((None, "bf16", "fp32"), ("fp32", "bf16")),
        ((None, "e5m2", "bf16"), ("bf16", "e5m2")),
    ],
)
def test_what_null_means(given: tuple[str | None, str | None, str], expected: tuple[str, str] | None) -> None:
    recipe = built(*given)
    assert ((recipe.matmul, recipe.gradient) if isinstance(recipe, RoundedOperands) else None) == expected


@pytest.mark.parametrize(("dtype", "largest"), [("e4m3", 448.0), ("e5m2", 57344.0)])
def test_values_beyond_a_format_saturate_and_nan_stays(dtype: str, largest: float) -> None:
    x = torch.tensor([largest * 2, -largest * 1e9, math.inf, -math.inf, math.nan, 0.0, largest])
    found = round_to(x, dtype).float()
    assert found[4].isnan()
    assert found[[0, 1, 2, 3, 5, 6]].tolist() == [largest, -largest, largest, -largest, 0.0, largest]


def test_the_run_says_what_it_multiplies_in_and_that_fp8_is_emulated() -> None:
    wide, narrow = built("bf16", None, "fp32").note, built("e4m3", "e5m2", "bf16").note
    assert wide == "recipe bf16 multiplies in bf16 × bf16 → fp32, backward in bf16 × bf16 → fp32."
    assert narrow is not None
    assert narrow.startswith("EMULATED FP8")
    assert "e4m3 × e4m3 → bf16, backward in e4m3 × e5m2 → bf16" in narrow


@pytest.mark.slow_cases("e4m3")
@pytest.mark.parametrize(
    ("matmul", "gradient", "model", "adapters"), [("bf16", None, "fp32", True), ("e4m3", "e5m2", "bf16", False)]
)
def test_a_model_trains_and_recomputation_changes_no_bit(
    matmul: str, gradient: str | None, model: str, adapters: bool
) -> None:
    batch = tiny.batch(tiny.documents([20, 12]))
    found, losses = [], []
    for block in (False, True):
        engine = tiny.engine(
            lora=tiny.lora() if adapters else None,
            dtype=MODEL[model],
            recipe=built(matmul, gradient, model),
            optimizer=tiny.ADAMW,
            recompute=block,
        )
        found.append(tiny.gradients(engine, [batch]))
        for group in engine.parameters.groups:
            group.grad.zero_()
        losses.append([engine.train_step([batch], step=step, lr=1e-2).read()[0] for step in range(4)])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
