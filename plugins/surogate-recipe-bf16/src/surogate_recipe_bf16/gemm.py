"""The product of a linear slot with operands rounded to other dtypes than the model's.

Suffixes: N tokens, I inputs, O outputs. A × B → C is one of fp32 × fp32 → fp32, bf16 × bf16 → fp32 or bf16,
e4m3 × e4m3 → fp32 or bf16, e4m3 × e5m2 → bf16. C is the model's dtype, sums are fp32, and there are no scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.plugin import bundles, compute

if TYPE_CHECKING:
    from surogate_core.plugin import dsl
    from surogate_recipe_bf16 import BF16Options

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8 = {DTYPES["e4m3"]: 448.0, DTYPES["e5m2"]: 57344.0}
"""The largest value of each 8-bit format."""
COMBINATIONS = frozenset(
    {
        ("fp32", "fp32", "fp32"),
        ("bf16", "bf16", "fp32"),
        ("bf16", "bf16", "bf16"),
        ("e4m3", "e4m3", "fp32"),
        ("e4m3", "e4m3", "bf16"),
        ("e4m3", "e5m2", "bf16"),
    }
)
"""(A, B, C) of every supported product; the configuration refuses others."""


class BF16(bundles.Recipe):
    """y = x Wᵀ in the dtype of x and W, summed in fp32 by the GEMM."""

    name = "bf16"
    plain = True

    def linear(self, x_NI: Tensor, weight_OI: Tensor, slot: dsl.TracedSlot) -> Tensor:
        """[N, O] in the dtype of both."""
        return x_NI @ weight_OI.t()


class RoundedOperands(bundles.Recipe):
    """Products of operands that are rounded to other dtypes than the model's."""

    name = "bf16"

    def __init__(self, *, matmul: str, gradient: str, model: str):
        """`matmul`: dtype of both operands of x Wᵀ. `gradient`: dtype of dy. `model`: dtype of the results."""
        self.matmul, self.gradient, self.model = matmul, gradient, model
        self.beside = "e4m3" if gradient == "e5m2" else gradient
        """Dtype of x and W in the products with dy."""
        assert {(matmul, matmul, model), (self.beside, gradient, model)} <= COMBINATIONS, (matmul, gradient, model)
        self.note = (
            f"recipe bf16 multiplies in {matmul} × {matmul} → {model}, "
            f"backward in {self.beside} × {gradient} → {model}."
        )
        if "e4m3" in (matmul, self.beside):
            how = "EMULATED FP8 without scales: values are rounded, products are fp32, slower than bf16."
            self.note = f"{how} {self.note}"

    @classmethod
    def of(cls, options: BF16Options, model: str) -> RoundedOperands | None:
        """None if every product has the dtype of its operands."""
        if options.matmul_dtype is None and options.gradient_dtype is None:
            return None
        matmul = options.matmul_dtype or model
        gradient = options.gradient_dtype or ("bf16" if matmul == "e4m3" else matmul)
        return None if matmul == gradient == model else cls(matmul=matmul, gradient=gradient, model=model)

    def linear(self, x_NI: Tensor, weight_OI: Tensor, slot: dsl.TracedSlot) -> Tensor:
        """[N, O] in the model's dtype, which x and W have."""
        y_NO: Tensor = _Linear.apply(x_NI, weight_OI, self)
        return y_NO

    def grouped(
        self, x_RI: Tensor, weights: Sequence[Tensor], ends_E: Tensor, slots: Sequence[dsl.TracedExperts]
    ) -> Sequence[Tensor]:
        """[R, O] of each slot of experts in the model's dtype."""
        return [_Experts.apply(x_RI, weights_EOI, ends_E, self) for weights_EOI in weights]


def round_to(x: Tensor, dtype: str) -> Tensor:
    """`x` rounded to nearest, ties to even. Values beyond an 8-bit format saturate, infinity too; NaN stays."""
    kind = DTYPES[dtype]
    if kind in FP8:
        x = x.float().clamp(-FP8[kind], FP8[kind])
    return x.to(kind)


def multiply(a_MK: Tensor, b_NK: Tensor, out: torch.dtype) -> Tensor:
    """A Bᵀ in `out`: as a GEMM of that dtype, or summed in fp32 and rounded once."""
    if a_MK.dtype == b_NK.dtype == out:
        return a_MK @ b_NK.t()
    return (a_MK.float() @ b_NK.float().t()).to(out)


def multiply_experts(a_RK: Tensor, b_ECK: Tensor, ends_E: Tensor, out: torch.dtype) -> Tensor:
    """Each row of A times its expert's Bᵀ in `out`, like `multiply`."""
    if not a_RK.dtype == b_ECK.dtype == out:
        a_RK, b_ECK = a_RK.float(), b_ECK.float()
    return compute.grouped_product(a_RK, b_ECK, ends_E).to(out)


class _Experts(Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor, recipe: RoundedOperands) -> Tensor:
        ctx.save_for_backward(x_RI, weights_EOI, ends_E)
        ctx.recipe = recipe
        x, weights = round_to(x_RI, recipe.matmul), round_to(weights_EOI, recipe.matmul)
        return multiply_experts(x, weights, ends_E, x_RI.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weights_EOI, ends_E = ctx.saved_tensors
        recipe: RoundedOperands = ctx.recipe
        dy, weights = round_to(dy_RO, recipe.gradient), round_to(weights_EOI, recipe.beside)
        dx_RI = multiply_experts(dy, weights.transpose(1, 2), ends_E, x_RI.dtype)
        dweights = None
        if ctx.needs_input_grad[1]:
            x = round_to(x_RI, recipe.beside)
            if not dy.dtype == x.dtype == weights_EOI.dtype:
                dy, x, weights = dy.float(), x.float(), weights.float()
            dweights = compute.weight_gradient(dy, x, weights, ends_E).to(weights_EOI.dtype)
        return dx_RI, dweights, None, None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, recipe: RoundedOperands) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.recipe = recipe
        return multiply(round_to(x_NI, recipe.matmul), round_to(weight_OI, recipe.matmul), x_NI.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        recipe: RoundedOperands = ctx.recipe
        dy = round_to(dy_NO, recipe.gradient)
        dx_NI = multiply(dy, round_to(weight_OI, recipe.beside).t(), x_NI.dtype)
        dweight_OI = None
        if ctx.needs_input_grad[1]:
            dweight_OI = multiply(dy.t(), round_to(x_NI, recipe.beside).t(), weight_OI.dtype)
        return dx_NI, dweight_OI, None
