"""The recipe's product, forward and backward, against float64."""

from __future__ import annotations

import pytest
import torch
from surogate_recipe_bf16 import BF16Options, surogate_recipe
from surogate_recipe_bf16.gemm import BF16

from surogate_core.plugin import bundles, dsl
from surogate_testing import tiny

SLOT = dsl.TracedSlot(
    name="q", module="self_attn.q_proj", inputs=96, outputs=40, bias=False, region="qkv", adapter=None, index=0
)
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}
"""Of the relative error in norm. bf16: half a unit in the last place is 2⁻⁹ of a value at most, and the inputs are
bf16 already; fp32 accumulation adds next to nothing."""


@pytest.mark.parametrize("scale", [1.0, 1e12, 1e-12])
@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_product_and_its_gradients(dtype: torch.dtype, tokens: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(tokens, SLOT.inputs, generator=generator) * scale).to(dtype).requires_grad_()
    weight = torch.randn(SLOT.outputs, SLOT.inputs, generator=generator).to(dtype).requires_grad_()
    dy = torch.randn(tokens, SLOT.outputs, generator=generator).to(dtype)
    y = BF16().linear(x, weight, SLOT)
    y.backward(dy)
    wide_x, wide_weight, wide_dy = (t.detach().double() for t in (x, weight, dy))
    assert y.dtype == dtype
    assert tiny.relative_error(y, wide_x @ wide_weight.t()) <= BOUNDS[dtype]
    assert tiny.relative_error(x.grad, wide_dy @ wide_weight) <= BOUNDS[dtype]
    assert tiny.relative_error(weight.grad, wide_dy.t() @ wide_x) <= BOUNDS[dtype]


def test_columns_in_any_order_of_memory() -> None:
    x = torch.randn(SLOT.inputs, 5).t()
    weight = torch.randn(SLOT.inputs, SLOT.outputs).t()
    torch.testing.assert_close(
        BF16().linear(x, weight, SLOT), BF16().linear(x.contiguous(), weight.contiguous(), SLOT), rtol=1e-5, atol=1e-5
    )


def test_it_is_offered_under_its_name_and_runs_anywhere() -> None:
    recipe = surogate_recipe()
    assert recipe.name == "bf16"
    assert isinstance(
        recipe.build(BF16Options(), bundles.RecipeContext(device=torch.device("cpu"), dtype="bf16")), BF16
    )
    assert recipe.unavailable(torch.device("cpu")) is None


def test_a_model_in_bf16_agrees_with_fp32() -> None:
    """Weights and activations have 8 bits: a loss of about 4 is good to a few 2⁻⁸ after a dozen roundings."""
    batch = tiny.batch(tiny.documents([20, 12]))
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = tiny.engine(recipe=BF16(), optimizer=tiny.ADAMW, lora=tiny.lora(), dtype=dtype)
        assert {t.dtype for t in engine.stores.weights.fetch("layer 0")} == {dtype}
        losses[dtype] = [engine.train_step([batch], step=step, lr=1e-2).read()[0] for step in range(5)]
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=2e-2)
    assert losses[torch.float32] != losses[torch.bfloat16]
