"""The FP8 product of a linear slot, forward and backward.

Suffixes: N tokens, I inputs, O outputs. y = x Wᵀ in e4m3 × e4m3; dx = dy W and dW = dyᵀ x with dy in
e5m2 and the other operand in e4m3. Each tensor has one scale, and products are accumulated in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from surogate_core.plugin import MachineError, bundles, fp8, fp8_rows
from surogate_recipe_fp8.experts import EMULATED, ExpertProducts, expert_codes, grouped
from surogate_recipe_fp8.panels import ScaledPanels
from surogate_recipe_fp8.rounding import rounded
from surogate_recipe_fp8.scaling import DelayedScaling

if TYPE_CHECKING:
    from surogate_core.plugin import dsl
    from surogate_recipe_fp8 import FP8Options

HEADER = 16
"""Bytes before the codes of a packed weight: the inverse of its scale, and padding."""
MULTIPLE = 16
"""The sides of a product must be multiples of this for cuBLASLt."""


class FP8Hybrid(bundles.Recipe):
    """The recipe on a device: products of FP8 tensor cores, or of values that are rounded to FP8, in fp32."""

    name = "fp8-hybrid"

    def __init__(self, *, native: bool, margin: int, history: int, note: str, experts: ExpertProducts = EMULATED):
        """`native`: whether products run on FP8 tensor cores. `history`: number of steps that determine a scale."""
        self.native, self.margin, self.history, self.note = native, margin, history, note
        self.experts, self.note_of_experts = experts, experts.note
        self.expert_codes = expert_codes if experts.native else None
        self.panel_op = ScaledPanels(margin) if native else None
        self._inputs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """The input of the last slot → (its version, its codes)."""

    @classmethod
    def of(cls, options: FP8Options, reason: str | None, *, experts: str | None = None) -> FP8Hybrid:
        """`reason`: why the device has no FP8 products, or None. `experts`: likewise for those of experts.

        `MachineError` if emulation is off and there are none.
        """
        if reason is not None and options.emulate == "never":
            raise MachineError(
                f"recipe=fp8-hybrid with recipe.emulate=never: {reason.partition(';')[0]}. "
                f"Fix: set recipe.emulate=auto to emulate, or recipe=bf16."
            )
        native = reason is None and options.emulate != "always"
        note = "recipe fp8-hybrid multiplies in e4m3, gradients in e5m2 × e4m3; model_dtype applies to everything else."
        if not native:
            why = "recipe.emulate=always" if reason is None else reason.partition(";")[0].partition(",")[0]
            note = f"EMULATED FP8 ({why}): numbers as FP8 would give, and slower than bf16. {note}"
        how = ExpertProducts(native and experts is None, experts or "recipe.emulate=always", options.emulate != "never")
        return cls(native=native, margin=options.margin, history=options.amax_history, note=note, experts=how)

    def linear(self, x_NI: Tensor, weight_OI: Tensor, slot: dsl.TracedSlot) -> Tensor:
        """y = x Wᵀ in x's dtype. The weight is [O, I], or its packed form."""
        assert slot.row is not None
        y_NO: Tensor = _Linear.apply(
            x_NI, weight_OI, slot.row, *self._input_codes(x_NI, weight_OI, slot.row), slot, self
        )
        return y_NO

    def _input_codes(self, x_NI: Tensor, weight_OI: Tensor, row: Tensor) -> Codes:
        """The codes of x, with the transpose's if the weight has a gradient; those of the slot before if it read the
        same x, unchanged: their rows have seen the same values, so their scales are equal.
        """
        both = torch.is_grad_enabled() and weight_OI.requires_grad
        version, known = self._inputs.get(x_NI, (-1, None))
        if known is None or version != x_NI._version or (both and known[1] is None):
            with torch.no_grad():
                known = _codes(x_NI, row, fp8.ACTIVATION, self.margin, both=both)
            self._inputs.clear()
            self._inputs[x_NI] = x_NI._version, known
        return known

    def grouped(
        self, x_RI: Tensor, weights: Sequence[Tensor], ends_E: Tensor, slots: Sequence[dsl.TracedExperts]
    ) -> Sequence[Tensor]:
        """y_RO of each slot of experts in x's dtype. Weights are [E, O, I], or their packed form.

        `MachineError` if emulation is off and the device has no such products.
        """
        return grouped(x_RI, weights, ends_E, slots, how=self.experts)

    def pack_experts(self, weights_EOI: Tensor, slot: dsl.ExpertSlot) -> Tensor:
        """Frozen weights as bytes: scales of rows, codes, and those of the transposes."""
        return fp8_rows.pack_experts(weights_EOI)

    def expert_parts(self, slot: dsl.ExpertSlot) -> Sequence[tuple[int, int]]:
        """Both kinds of scales, then both layouts of codes."""
        return fp8_rows.packed_parts(slot.count, slot.outputs, slot.inputs)

    def state(self, slots: int, device: torch.device) -> DelayedScaling:
        """Delayed scales of that many slots."""
        return DelayedScaling(slots, history=self.history, margin=self.margin, device=device)

    def pack(self, weight_OI: Tensor, slot: dsl.LinearSlot) -> Tensor:
        """A frozen weight as bytes [16 + 2·O·I]: 1 / its scale as fp32, its e4m3 codes, and those of its transpose."""
        scale = fp8.scale_of(fp8.amax_of(weight_OI), fp8.E4M3_MAX, margin=self.margin, old=1.0)
        codes_OI = fp8.quantise(weight_OI, scale, fp8.E4M3)
        header = torch.zeros(HEADER // 4, dtype=torch.float32, device=weight_OI.device)
        header[0] = 1 / scale
        layouts = codes_OI, codes_OI.t()
        return torch.cat([header.view(torch.uint8), *(c.contiguous().view(torch.uint8).view(-1) for c in layouts)])

    def rounded(self, x: Tensor, role: bundles.Role) -> tuple[Tensor, Tensor]:
        """(the rounded values of x in fp32, a mask of clipped values), at the scale of its own largest value."""
        return rounded(x, role, self.margin)

    def rounded_experts(self, x: Tensor, role: bundles.Role) -> tuple[Tensor, Tensor]:
        """(the rounded values of x in fp32, no mask of clipped values: each row has its own scale)."""
        return fp8_rows.row_values(*fp8_rows.quantise_rows(x), torch.float32), torch.zeros_like(x, dtype=torch.bool)


def multiply(
    a_MK: Tensor,
    b_NK: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    out: torch.dtype,
    native: bool,
    *,
    fast: bool = False,
) -> Tensor:
    """(a · inverse_a)(b · inverse_b)ᵀ, [M, N] in `out`, from FP8 codes with K contiguous.

    `fast`: native products may add all of K inside the tensor cores, whose sums have fewer bits than fp32.
    """
    if native and all(n % MULTIPLE == 0 for n in (*a_MK.shape, b_NK.shape[0])) and out != torch.float64:
        product: Tensor = torch._scaled_mm(
            a_MK, b_NK.t(), scale_a=inverse_a, scale_b=inverse_b, out_dtype=out, use_fast_accum=fast
        )
        return product
    return ((a_MK.float() @ b_NK.float().t()) * (inverse_a * inverse_b)).to(out)


def unpack(packed: Tensor, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [O, I], codes [I, O], 1 / scale 0-d): views of a weight that `FP8Hybrid.pack` made."""
    size = outputs * inputs
    codes_OI = packed[HEADER : HEADER + size].view(fp8.E4M3).view(outputs, inputs)
    codes_IO = packed[HEADER + size :].view(fp8.E4M3).view(inputs, outputs)
    return codes_OI, codes_IO, packed[:4].view(torch.float32)[0]


Codes = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""What `_codes` returns."""


def _codes(x_RC: Tensor, row: Tensor, role: int, margin: int, *, both: bool) -> Codes:
    """(codes [R, C], those of the transpose if asked for, largest value 0-d, 1 / scale 0-d)."""
    if both:
        return fp8.quantise_both(x_RC, row, role, margin)
    amax = fp8.amax_of(x_RC)
    scale = fp8.scale_in_use(row, role, amax, fp8.KIND[role], margin)
    return fp8.quantise(x_RC, scale, fp8.KIND[role]), None, amax, 1 / scale


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight: Tensor,
        row: Tensor,
        x_codes: Tensor,
        codes_IN: Tensor | None,
        amax_x: Tensor,
        inverse_x: Tensor,
        slot: dsl.TracedSlot,
        recipe: FP8Hybrid,
    ) -> Tensor:
        # The backward needs transposes: of the activation for dW, of the weight for dx.
        kept_w: Tensor | None = weight
        if slot.packed:
            w_codes, _, inverse_w = unpack(weight, slot.outputs, slot.inputs)
            amax_w = torch.zeros_like(amax_x)
        else:
            both = any(ctx.needs_input_grad[:3])
            w_codes, kept_w, amax_w, inverse_w = _codes(weight, row, fp8.WEIGHT, recipe.margin, both=both)
        ctx.save_for_backward(codes_IN, kept_w, inverse_x, inverse_w, amax_x, amax_w, row)
        ctx.slot, ctx.recipe = slot, recipe
        ctx.dtypes = x_NI.dtype, weight.dtype
        # Gradients have a wider range, so their sums keep the digits of fp32.
        return multiply(x_codes, w_codes, inverse_x, inverse_w, x_NI.dtype, recipe.native, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        codes_IN, weight, inverse_x, inverse_w, amax_x, amax_w, row = ctx.saved_tensors
        slot, recipe = ctx.slot, ctx.recipe
        trained = ctx.needs_input_grad[1]
        dy_codes, codes_ON, amax_dy, inverse_dy = _codes(dy_NO, row, fp8.GRADIENT, recipe.margin, both=trained)
        codes_IO = unpack(weight, slot.outputs, slot.inputs)[1] if slot.packed else weight
        dtype_x, dtype_w = ctx.dtypes
        dx_NI = multiply(dy_codes, codes_IO, inverse_dy, inverse_w, dtype_x, recipe.native)
        dweight = None
        if codes_ON is not None:
            dweight = multiply(codes_ON, codes_IN, inverse_dy, inverse_x, dtype_w, recipe.native)
        observed = torch.stack((amax_x, amax_w, amax_dy))
        return dx_NI, dweight, observed, None, None, None, None, None, None
