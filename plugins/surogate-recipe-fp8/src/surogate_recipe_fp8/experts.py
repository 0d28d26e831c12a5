"""The FP8 product of the experts of a mixture, forward and backward.

Suffixes: R rows sorted by expert, E experts, I inputs, O outputs. y = x Wᵀ and dx = dy W in e4m3 × e4m3 with one scale
for each row of both operands (`surogate_core.formats.fp8_rows`); dW = dyᵀ x in the dtype of x and dy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.plugin import MachineError, compute, fp8_rows

if TYPE_CHECKING:
    from surogate_core.plugin import dsl


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """How the products of experts are computed."""

    native: bool
    """On FP8 tensor cores."""
    reason: str = ""
    """Why not."""
    may_emulate: bool = True

    @property
    def note(self) -> str:
        """What the run says about a model with experts."""
        how = "recipe fp8-hybrid multiplies experts in e4m3 with a scale for each row, and for dW in model_dtype."
        return (
            how
            if self.native
            else f"EMULATED FP8 products of experts ({self.reason}): numbers as FP8 would give. {how}"
        )

    def on(self, device: torch.device) -> bool:
        """Whether products are native on the device, after a check of the kernel. `MachineError` if they are not, and
        emulation is off.
        """
        # Nothing runs on a GPU that a plan assumes.
        checked = self.native and device.type == "cuda" and compute.assumed() is None
        wrong = fp8_rows.fault(device) if checked else None
        if self.native and wrong is None:
            return True
        if not self.may_emulate:
            raise MachineError(
                f"recipe=fp8-hybrid with recipe.emulate=never: no FP8 products of experts ({wrong or self.reason}). "
                f"Fix: set recipe.emulate=auto to emulate them, or recipe=bf16."
            )
        return False


FAST = True
"""Tensor cores accumulate with fewer bits than fp32, in both directions: the rounding of the operands is far larger
(relative errors of a product are 3.8e-2 either way), and full sums run at less than half the speed of bf16.
"""
EMULATED = ExpertProducts(False, "recipe.emulate=always")


def grouped(
    x_RI: Tensor, weights: Sequence[Tensor], ends_E: Tensor, slots: Sequence[dsl.TracedExperts], *, how: ExpertProducts
) -> Sequence[Tensor]:
    """y_RO of each slot, like `Recipe.grouped`."""
    sides = {side for slot in slots for side in (slot.inputs, slot.outputs)}
    native = how.on(x_RI.device) and x_RI.dtype == torch.bfloat16 and fp8_rows.fits(slots[0].count, *sides)
    found: Sequence[Tensor] = _Grouped.apply(x_RI, ends_E, slots, native, *weights)
    return found


def expert_codes(packed: Tensor, slot: dsl.ExpertSlot) -> tuple[compute.Codes, compute.Codes]:
    """Like `Recipe.expert_codes`."""
    return fp8_rows.packed_views(packed, slot.count, slot.outputs, slot.inputs)


def _operand(weight: Tensor, slot: dsl.TracedExperts, *, transposed: bool) -> compute.Codes:
    """(codes, inverse scales) of the weights [E, O, I] or of their transposes."""
    if slot.packed:
        return expert_codes(weight, slot)[transposed]
    codes, inverse = fp8_rows.quantise_rows(weight.transpose(1, 2) if transposed else weight)
    return codes.contiguous(), inverse


def _product(
    rows: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    ends_E: Tensor,
    dtype: torch.dtype,
    *,
    native: bool,
) -> Tensor:
    if native:
        return fp8_rows.native_product(*rows, *weights, ends_E, FAST)
    return fp8_rows.emulated_product(rows, weights, ends_E, dtype)


class _Grouped(Function):
    @staticmethod
    def forward(
        ctx: Any, x_RI: Tensor, ends_E: Tensor, slots: Sequence[dsl.TracedExperts], native: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        trained = any(ctx.needs_input_grad[4:])
        # A trained weight is rounded again in the backward: its codes would cost half as much memory as itself.
        ctx.save_for_backward(x_RI if trained else None, ends_E, *weights)
        ctx.slots, ctx.native, ctx.dtype = slots, native, x_RI.dtype
        rows, found = fp8_rows.quantise_rows(x_RI), []
        for weight, slot in zip(weights, slots, strict=True):
            operand = _operand(weight, slot, transposed=False)
            found.append(_product(rows, operand, ends_E, x_RI.dtype, native=native))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, ends_E, *weights = ctx.saved_tensors
        dx_RI: Tensor | None = None
        dweights: list[Tensor | None] = []
        for number, (dy_RO, weight, slot) in enumerate(zip(dys, weights, ctx.slots, strict=True)):
            operand = _operand(weight, slot, transposed=True)
            rows = fp8_rows.quantise_rows(dy_RO)
            part = _product(rows, operand, ends_E, ctx.dtype, native=ctx.native)
            dx_RI = part if dx_RI is None else dx_RI + part
            trained = ctx.needs_input_grad[4 + number]
            dweights.append(compute.weight_gradient(dy_RO, x_RI, weight, ends_E) if trained else None)
        return dx_RI, None, None, None, *dweights
