"""The emulated NVFP4 product of the experts of a mixture, forward and backward.

Suffixes: R rows sorted by expert, E experts, I inputs, O outputs. y = x Wᵀ and dx = dy W with each expert's W in blocks
of 16×16 and a tensor scale of its own; x and dy have one tensor scale for all rows, and gradients are rounded
stochastically. dW = dyᵀ x in the dtype of x and dy: an expert's rows do not fill blocks along the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.plugin import compute, fp4, nvfp4
from surogate_recipe_nvfp4.rounding import FIRST_SALT, Frozen

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

NOTE = (
    "EMULATED NVFP4 (there is no product of experts in e2m1): recipe nvfp4 multiplies experts' operands rounded to "
    "e2m1, and those of their dW unrounded."
)
NEVER = (
    "recipe=nvfp4 with recipe.emulate=never: products of experts in e2m1 are emulated on every device. "
    "Fix: set recipe.emulate=auto, or recipe=fp8-hybrid or recipe=bf16."
)
HEADER = 4
"""Bytes of an expert's tensor scale, before its codes."""


def pack(weights_EOI: Tensor, frozen: Frozen) -> Tensor:
    """Frozen weights as bytes [E, n]: of each its tensor scale, its codes, and its block scales."""
    rows = []
    # One by one: the candidates of all experts of a layer, in fp64, would be many times larger than their weights.
    for weight_OI in weights_EOI:
        found = frozen.square(weight_OI)
        parts = found.decode.reshape(1).view(torch.uint8), fp4.pairs(found.codes), found.scales.view(torch.uint8)
        rows.append(torch.cat([part.reshape(-1) for part in parts]))
    return torch.stack(rows)


def unpack(packed: Tensor, outputs: int, inputs: int) -> nvfp4.Quantised:
    """What `pack` made."""
    count = len(packed)
    p, q = (-(-n // nvfp4.BLOCK) * nvfp4.BLOCK for n in (outputs, inputs))
    middle = HEADER + p * q // 2
    codes = fp4.unpaired(packed[:, HEADER:middle].reshape(count * p, q // 2)).view(count, p, q)
    scales = packed[:, middle:].reshape(-1).view(nvfp4.E4M3).view(count, p // nvfp4.BLOCK, q // nvfp4.BLOCK)
    return nvfp4.Quantised(codes, scales, packed[:, :HEADER].reshape(-1).view(torch.float32))


def _weights(weight: Tensor, slot: dsl.TracedExperts, *, four_over_six: bool) -> tuple[Tensor, Tensor]:
    """(codes times block scales [E, O, I] bf16, exact; factor of each expert [E])."""
    if slot.packed:
        found = unpack(weight, slot.outputs, slot.inputs)
    else:
        found = nvfp4.quantise(weight, square=True, four_over_six=four_over_six)
    return found.blocks(slot.outputs, slot.inputs).bfloat16(), found.decode


def _product(rows: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, C] in `dtype`. On a GPU the sum is rounded to bf16 before it is multiplied by the factors."""
    (x_RK, decode), (w_ECK, decode_E) = rows, weights
    if x_RK.device.type == "cpu":
        x_RK, w_ECK = x_RK.float(), w_ECK.float()
    places_R = torch.arange(len(x_RK), device=ends_E.device, dtype=ends_E.dtype)
    factor_R = decode * decode_E[torch.searchsorted(ends_E, places_R, right=True)]
    return (compute.grouped_product(x_RK, w_ECK, ends_E).float() * factor_R[:, None]).to(dtype)


def grouped(
    x_RI: Tensor,
    weights: Sequence[Tensor],
    ends_E: Tensor,
    slots: Sequence[dsl.TracedExperts],
    *,
    four_over_six: bool,
    stochastic: bool,
) -> Sequence[Tensor]:
    """y_RO of each slot, like `Recipe.grouped`."""
    seed = slots[0].seed if stochastic else None
    found: Sequence[Tensor] = _Grouped.apply(x_RI, ends_E, seed, slots, four_over_six, *weights)
    return found


class _Grouped(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        ends_E: Tensor,
        seed: Tensor | None,
        slots: Sequence[dsl.TracedExperts],
        four_over_six: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        trained = any(ctx.needs_input_grad[5:])
        ctx.save_for_backward(x_RI if trained else None, ends_E, seed, *weights)
        ctx.slots, ctx.four_over_six, ctx.dtype = slots, four_over_six, x_RI.dtype
        rows = nvfp4.nvfp4_rounded(x_RI, None, nvfp4.Operand(four_over_six=four_over_six))
        return tuple(
            _product(rows, _weights(weight, slot, four_over_six=four_over_six), ends_E, x_RI.dtype)
            for weight, slot in zip(weights, slots, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, ends_E, seed, *weights = ctx.saved_tensors
        dx_RI: Tensor | None = None
        dweights: list[Tensor | None] = []
        for number, (dy_RO, weight, slot) in enumerate(zip(dys, weights, ctx.slots, strict=True)):
            how = nvfp4.Operand(four_over_six=ctx.four_over_six, salt=FIRST_SALT + 2 * slot.index)
            values, decode_E = _weights(weight, slot, four_over_six=ctx.four_over_six)
            rows = nvfp4.nvfp4_rounded(dy_RO, seed, how)
            part = _product(rows, (values.transpose(1, 2), decode_E), ends_E, ctx.dtype)
            dx_RI = part if dx_RI is None else dx_RI + part
            trained = ctx.needs_input_grad[5 + number]
            dweights.append(compute.weight_gradient(dy_RO, x_RI, weight, ends_E) if trained else None)
        return dx_RI, None, None, None, None, *dweights
