"""The products of experts with operands of other dtypes, against the rounded operands in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from surogate_recipe_bf16 import BF16Options
from surogate_recipe_bf16.gemm import BF16, RoundedOperands, round_to
from torch import Tensor

from surogate_core.service.kernels import masked_factors, masked_product
from surogate_testing import tiny
from surogate_testing.recipes import EXPERTS

ENDS = torch.tensor([5, 5, 45, 46], dtype=torch.int32)
MODEL = {"fp32": torch.float32, "bf16": torch.bfloat16}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("model", "matmul", "gradient", "beside"),
    [
        ("bf16", "e4m3", "e5m2", "e4m3"),
        ("bf16", "e4m3", "bf16", "bf16"),
        ("fp32", "bf16", "bf16", "bf16"),
        ("fp32", "bf16", "fp32", "fp32"),
    ],
)
def test_products_are_of_the_rounded_operands(model: Any, matmul: Any, gradient: Any, beside: str) -> None:
    recipe = RoundedOperands.of(BF16Options(matmul_dtype=matmul, gradient_dtype=gradient), model)
    assert recipe is not None
    near = 2**-7 if model == "bf16" else 1e-6
    x = normal(46, 64, seed=0).to(MODEL[model]).requires_grad_()
    ws = [normal(4, s.outputs, 64, seed=1).to(MODEL[model]).requires_grad_() for s in EXPERTS]
    dys = [normal(46, s.outputs, seed=2).to(MODEL[model]) for s in EXPERTS]
    ys = recipe.grouped(x, ws, ENDS, EXPERTS)
    found = torch.autograd.grad(list(ys), [x, *ws], dys)
    dx = torch.zeros(46, 64, dtype=torch.float64)

    def wide(t: Tensor, dtype: str) -> Tensor:
        return round_to(t.detach(), dtype).double()

    for y, w, dy, dw in zip(ys, ws, dys, found[1:], strict=True):
        assert y.dtype == dw.dtype == MODEL[model]
        assert tiny.relative_error(y, masked_product(wide(x, matmul), wide(w, matmul), ENDS)) < near
        dx += masked_product(wide(dy, gradient), wide(w, beside).transpose(1, 2), ENDS)
        assert tiny.relative_error(dw, masked_factors(wide(dy, gradient), wide(x, beside), ENDS)) < near
    assert tiny.relative_error(found[0], dx) < near


def test_the_plain_recipe_leaves_experts_to_the_kernels() -> None:
    assert BF16().grouped is None
