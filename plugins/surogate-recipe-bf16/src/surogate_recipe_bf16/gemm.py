"""The product of a linear slot with operands rounded to other dtypes than the model's.

Suffixes: N tokens, I inputs, O outputs. A × B → C is one of fp32 × fp32 → fp32, bf16 × bf16 → fp32 or bf16,
e4m3 × e4m3 → fp32 or bf16, e4m3 × e5m2 → bf16. C is the model's dtype, sums are fp32, and there are no scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from surogate_core.bundles import RecipeSettings
    from surogate_core.dsl.slots import TracedSlot

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
"""(A, B, C) of every product that there is; the configuration refuses the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The dtypes of a run's products."""

    matmul: str
    """Of both operands of x Wᵀ."""
    gradient: str
    """Of dy; x and W are rounded to the same in the backward products, or to e4m3 beside e5m2."""
    model: str

    @classmethod
    def of(cls, settings: RecipeSettings) -> Prepared | None:
        """None where every product is in the dtype of what is given."""
        model = settings.model_dtype
        if model is None or (settings.matmul_dtype is None and settings.gradient_dtype is None):
            return None
        matmul = settings.matmul_dtype or model
        gradient = settings.gradient_dtype or ("bf16" if matmul == "e4m3" else matmul)
        if matmul == gradient == model:
            return None
        prepared = cls(matmul=matmul, gradient=gradient, model=model)
        assert {(matmul, matmul, model), (prepared.beside, gradient, model)} <= COMBINATIONS, prepared
        return prepared

    @property
    def beside(self) -> str:
        """What x and W are rounded to beside dy."""
        return "e4m3" if self.gradient == "e5m2" else self.gradient

    @property
    def note(self) -> str:
        """What the run says."""
        text = (
            f"recipe bf16 multiplies in {self.matmul} × {self.matmul} → {self.model}, "
            f"backward in {self.beside} × {self.gradient} → {self.model}."
        )
        if "e4m3" in (self.matmul, self.beside):
            return f"EMULATED FP8 without scales: values are rounded, products are fp32, slower than bf16. {text}"
        return text


def round_to(x: Tensor, dtype: str) -> Tensor:
    """`x` to nearest, ties to even. Beyond an 8-bit format values saturate, infinity too; NaN stays."""
    kind = DTYPES[dtype]
    if kind in FP8:
        x = x.float().clamp(-FP8[kind], FP8[kind])
    return x.to(kind)


def multiply(a_MK: Tensor, b_NK: Tensor, out: torch.dtype) -> Tensor:
    """A Bᵀ in `out`: as a GEMM of that dtype, or summed in fp32 and rounded once."""
    if a_MK.dtype == b_NK.dtype == out:
        return a_MK @ b_NK.t()
    return (a_MK.float() @ b_NK.float().t()).to(out)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, options: Prepared) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.options = options
        return multiply(round_to(x_NI, options.matmul), round_to(weight_OI, options.matmul), x_NI.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        options: Prepared = ctx.options
        dy = round_to(dy_NO, options.gradient)
        dx_NI = multiply(dy, round_to(weight_OI, options.beside).t(), x_NI.dtype)
        dweight_OI = None
        if ctx.needs_input_grad[1]:
            dweight_OI = multiply(dy.t(), round_to(x_NI, options.beside).t(), weight_OI.dtype)
        return dx_NI, dweight_OI, None


def linear(x_NI: Tensor, weight_OI: Tensor, slot: TracedSlot, options: Prepared) -> Tensor:
    """y = x Wᵀ in the model's dtype, which x and W have."""
    y_NO: Tensor = _Linear.apply(x_NI, weight_OI, options)
    return y_NO
