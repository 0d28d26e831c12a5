"""The NVFP4 product of a linear slot, forward and backward, native or emulated.

Suffixes: N tokens, I inputs, O outputs. y = x Wᵀ and dx = dy W with W in blocks of 16×16, so that both see the same
values; dW = dyᵀ x with both operands rotated along the tokens by a Hadamard transform. Gradients are rounded
stochastically. Emulation multiplies codes times block scales, which bf16 represents exactly, with fp32 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.plugin import MachineError, UserError, bundles, compute, fp4, nvfp4
from surogate_recipe_nvfp4 import experts, native
from surogate_recipe_nvfp4.rounding import FIRST_SALT, Frozen, rounded

if TYPE_CHECKING:
    from surogate_core.plugin import dsl
    from surogate_recipe_nvfp4 import NVFP4Options

HEADER = 16
"""Bytes before the codes of a packed weight: its tensor scale, and padding."""


class NVFP4(bundles.Recipe):
    """The recipe on a device: products of FP4 tensor cores, or of values that are rounded to NVFP4, in bf16."""

    name = "nvfp4"
    note_of_experts = experts.NOTE

    def __init__(
        self,
        *,
        native: bool,
        four_over_six: bool,
        stochastic: bool,
        note: str,
        may_emulate: bool = True,
        frozen: Frozen | None = None,
    ):
        """`native`: whether products run on FP4 tensor cores, where their sides allow it; see `native.fits`. `frozen`:
        how frozen weights are rounded; without it as trained ones.
        """
        self.frozen = frozen or Frozen(four_over_six=four_over_six)
        self.native, self.four_over_six, self.stochastic, self.note = native, four_over_six, stochastic, note
        self.may_emulate = may_emulate

    @classmethod
    def of(cls, options: NVFP4Options, device: torch.device, reason: str | None) -> NVFP4:
        """`reason`: why the device has no NVFP4 products, or None.

        `MachineError` if emulation is off and there are none; `UserError` for a `backend` that torch lacks.
        """
        if reason is not None and options.emulate == "never":
            has_fp8 = device.type == "cuda" and compute.capability(device) >= (8, 9)
            raise MachineError(
                f"recipe=nvfp4 with recipe.emulate=never: {reason.partition(';')[0]}. "
                f"Fix: set recipe.emulate=auto to emulate, or {'recipe=fp8-hybrid or ' if has_fp8 else ''}recipe=bf16."
            )
        is_native = reason is None and options.emulate != "always"
        if is_native and options.backend != "cutlass":
            raise UserError(
                f"fp4_backend={options.backend}: torch {torch.__version__} multiplies NVFP4 through cuBLASLt, "
                f"and has no cuDNN product. Fix: leave fp4_backend at cutlass, which is torch's own choice."
            )
        note = "recipe nvfp4 multiplies in e2m1 forward and backward; model_dtype applies to everything else."
        if is_native:
            note = f"{note} fp4_backend={options.backend}: products are torch's scaled_mm, which is cuBLASLt."
        else:
            why = "recipe.emulate=always" if reason is None else reason.partition(";")[0]
            unused = "" if options.backend == "cutlass" else f" fp4_backend={options.backend} has no effect."
            note = f"EMULATED NVFP4 ({why}): numbers as NVFP4 would give, and slower than bf16. {note}{unused}"
        stochastic = not options.nearest_gradients
        return cls(
            native=is_native,
            four_over_six=options.four_over_six,
            stochastic=stochastic,
            note=note,
            may_emulate=options.emulate != "never",
            frozen=Frozen(
                four_over_six=options.four_over_six,
                height=1 if options.frozen_blocks == "1x16" else nvfp4.BLOCK,
                search=options.search_scales,
            ),
        )

    def linear(self, x_NI: Tensor, weight_OI: Tensor, slot: dsl.TracedSlot) -> Tensor:
        """y = x Wᵀ in x's dtype. The weight is [O, I], or its packed form. Without a seed gradients round to
        nearest.
        """
        y_NO: Tensor = _Linear.apply(x_NI, weight_OI, slot.seed, slot, self)
        return y_NO

    def pack(self, weight_OI: Tensor, slot: dsl.LinearSlot) -> Tensor:
        """A frozen weight as bytes: tensor scale, then codes and block scales of it and of its transpose.

        For sides that are multiples of 16 a little more than one byte a parameter, 1.125 bytes with blocks of 1×16.
        """
        layouts = self.frozen.layouts(weight_OI)
        header = torch.zeros(HEADER // 4, dtype=torch.float32, device=weight_OI.device)
        header[0] = layouts[0].decode  # both have the same amax
        parts = [header.view(torch.uint8)]
        for layout in layouts:
            parts += [fp4.pairs(layout.codes).reshape(-1), layout.scales.contiguous().view(torch.uint8).view(-1)]
        return torch.cat(parts)

    def grouped(
        self, x_RI: Tensor, weights: Sequence[Tensor], ends_E: Tensor, slots: Sequence[dsl.TracedExperts]
    ) -> Sequence[Tensor]:
        """y_RO of each slot of experts in x's dtype, emulated. Weights are [E, O, I], or their packed form.

        `MachineError` if emulation is off.
        """
        if not self.may_emulate:
            raise MachineError(experts.NEVER)
        return experts.grouped(
            x_RI, weights, ends_E, slots, four_over_six=self.four_over_six, stochastic=self.stochastic
        )

    def pack_experts(self, weights_EOI: Tensor, slot: dsl.ExpertSlot) -> Tensor:
        """Frozen weights as bytes [E, n]: tensor scale, codes and block scales of each."""
        return experts.pack(weights_EOI, self.frozen)

    def rounded(self, x: Tensor, role: bundles.Role) -> tuple[Tensor, Tensor]:
        """(the rounded values of x in fp32, a mask of values beyond the largest of their block). Weights are rounded as
        frozen ones.
        """
        return rounded(x, role, self.frozen)

    def rounded_experts(self, x: Tensor, role: bundles.Role) -> tuple[Tensor, Tensor]:
        """`rounded`, for weights with a tensor scale of each expert, in blocks of 16×16 as they are packed."""
        if x.ndim == 2:
            return self.rounded(x, role)
        square = replace(self.frozen, height=nvfp4.BLOCK)
        values, clipped = zip(*(rounded(weight_OI, role, square) for weight_OI in x), strict=True)
        return torch.stack(values), torch.stack(clipped)


# An op of its own, since not every Inductor takes a product whose result is wider than its operands.
@torch.library.custom_op("surogate::nvfp4_wide_product", mutates_args=())
def _cuda_product(a_RK: Tensor, b_CK: Tensor) -> Tensor:
    return torch.mm(a_RK, b_CK.t(), out_dtype=torch.float32)


@_cuda_product.register_fake
def _(a_RK: Tensor, b_CK: Tensor) -> Tensor:
    return a_RK.new_empty(a_RK.shape[0], b_CK.shape[0], dtype=torch.float32)


def wide_product(a_RK: Tensor, b_CK: Tensor) -> Tensor:
    """a bᵀ, [R, C] fp32, of bf16 matrices; the products are exact."""
    if a_RK.device.type == "cuda":
        return _cuda_product(a_RK, b_CK)
    return a_RK.float() @ b_CK.float().t()


@dataclass(frozen=True, slots=True)
class Rounded:
    """An operand of an emulated product: `values` [R, K] bf16 times `decode`, 0-d fp32."""

    values: Tensor
    decode: Tensor

    def times(self, other: Rounded, out: torch.dtype) -> Tensor:
        """self otherᵀ in `out`."""
        return (wide_product(self.values, other.values) * (self.decode * other.decode)).to(out)


@dataclass(frozen=True, slots=True)
class Coded:
    """An operand of a native product: packed codes, scales of blocks of 1×16 or 16×16, and `decode`."""

    codes: Tensor
    scales: Tensor
    decode: Tensor

    def times(self, other: Coded, out: torch.dtype) -> Tensor:
        """self otherᵀ in `out`."""
        a, b = ((o.codes, native.swizzled(native.by_row(o.scales, o.codes.shape[0])), o.decode) for o in (self, other))
        return native.product(*a, *b).to(out)

    def rounded(self, rows: int, inner: int) -> Rounded:
        """The same for an emulated product, without padding."""
        found = nvfp4.Quantised(fp4.unpaired(self.codes), self.scales, self.decode)
        return Rounded(found.blocks(rows, inner).bfloat16(), self.decode)


def operand(x: Tensor, seed: Tensor | None, how: nvfp4.Operand, is_native: bool) -> Any:
    """The matrix, transformed as `how` says, as an operand; both operands of a product are of the same kind."""
    return Coded(*nvfp4.nvfp4_quantised(x, seed, how)) if is_native else Rounded(*nvfp4.nvfp4_rounded(x, seed, how))


def frozen_operand(packed: Tensor, slot: dsl.TracedSlot, recipe: NVFP4, *, transposed: bool, is_native: bool) -> Any:
    """The weight [O, I] of a slot, or its transpose, of what `NVFP4.pack` made."""
    outputs, inputs = slot.outputs, slot.inputs
    coded = unpack(packed, outputs, inputs, height=recipe.frozen.height, transposed=transposed)
    return coded if is_native else coded.rounded(*((inputs, outputs) if transposed else (outputs, inputs)))


def _sizes(rows: int, inner: int, height: int) -> tuple[int, int, int]:
    """(padded rows, padded inner dimension, rows of block scales) of a matrix in blocks of this height."""
    blocks = -(-rows // height)
    return blocks * height, -(-inner // nvfp4.BLOCK) * nvfp4.BLOCK, blocks


def unpack(packed: Tensor, outputs: int, inputs: int, *, height: int = nvfp4.BLOCK, transposed: bool) -> Coded:
    """The weight [O, I], or its transpose, of what `NVFP4.pack` made of blocks of `height` × 16."""
    start = HEADER
    p, q, blocks = _sizes(outputs, inputs, height)
    if transposed:
        start += p * q // 2 + blocks * q // nvfp4.BLOCK
        p, q, blocks = _sizes(inputs, outputs, height)
    middle = start + p * q // 2
    scales = packed[middle : middle + blocks * q // nvfp4.BLOCK].view(nvfp4.E4M3).view(blocks, q // nvfp4.BLOCK)
    return Coded(packed[start:middle].view(p, q // 2), scales, packed[:4].view(torch.float32)[0])


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight: Tensor, seed: Tensor | None, slot: dsl.TracedSlot, recipe: NVFP4
    ) -> Tensor:
        outputs, inputs, fos = slot.outputs, slot.inputs, recipe.four_over_six
        ctx.slot, ctx.recipe, ctx.dtypes = slot, recipe, (x_NI.dtype, weight.dtype)
        ctx.native = recipe.native and native.fits(x_NI.shape[0], outputs, inputs)
        x = operand(x_NI, None, nvfp4.Operand(four_over_six=fos), ctx.native)
        if slot.packed:
            w = frozen_operand(weight, slot, recipe, transposed=False, is_native=ctx.native)
        else:
            w = operand(weight, None, nvfp4.Operand(square=True, four_over_six=fos), ctx.native)
        # The backward rounds a trained weight again: to keep its rounded values would cost as much memory as itself.
        ctx.save_for_backward(None if slot.packed else x_NI, weight, seed)
        y_NO: Tensor = x.times(w, x_NI.dtype)
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight, seed = ctx.saved_tensors
        slot, recipe = ctx.slot, ctx.recipe
        fos = recipe.four_over_six
        seed = seed if recipe.stochastic else None
        salt = FIRST_SALT + 2 * slot.index
        dy = operand(dy_NO, seed, nvfp4.Operand(four_over_six=fos, salt=salt), ctx.native)
        if slot.packed:
            w_t = frozen_operand(weight, slot, recipe, transposed=True, is_native=ctx.native)
        else:
            w_t = operand(weight, None, nvfp4.Operand(square=True, four_over_six=fos, transposed=True), ctx.native)
        dtype_x, dtype_w = ctx.dtypes
        dx_NI = dy.times(w_t, dtype_x)
        dweight = None
        if ctx.needs_input_grad[1]:
            # Along the tokens; their number is padded with zeros that the rotation fills.
            a = operand(dy_NO, seed, nvfp4.Operand(transposed=True, rotated=True, salt=salt + 1), ctx.native)
            b = operand(x_NI, None, nvfp4.Operand(transposed=True, rotated=True), ctx.native)
            dweight = a.times(b, dtype_w)
        return dx_NI, dweight, None, None, None
