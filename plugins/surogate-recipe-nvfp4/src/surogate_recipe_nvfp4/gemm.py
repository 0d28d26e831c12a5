"""The NVFP4 product of a linear slot, forward and backward, emulated.

Suffixes: N tokens, I inputs, O outputs. y = x Wᵀ and dx = dy W with W in blocks of 16×16, so that both
see the same values; dW = dyᵀ x with both operands rotated along the tokens by a Hadamard transform.
Gradients are rounded stochastically. Values are rounded to NVFP4 and multiplied in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.errors import MachineError
from surogate_core.kernels import ops
from surogate_recipe_nvfp4.blocks import BLOCK, E4M3, Quantised, hadamard, pack_codes, quantise, unpack_codes

if TYPE_CHECKING:
    from surogate_core.bundles import RecipeSettings
    from surogate_core.dsl.slots import LinearSlot, TracedSlot
    from surogate_recipe_nvfp4 import NVFP4Options

HEADER = 16
"""Bytes before the codes of a packed weight: its tensor scale, and the alignment of what follows."""
FIRST_SALT = 64
"""Random bits of slots are numbered from here, apart from their dropout masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The recipe's options with the run's settings."""

    four_over_six: bool
    stochastic: bool
    note: str

    @classmethod
    def of(cls, options: NVFP4Options, settings: RecipeSettings) -> Prepared:
        """`MachineError` where emulation is off, since there is nothing else yet."""
        if options.emulate == "never":
            raise MachineError(
                "recipe=nvfp4 with recipe.emulate=never: this version has no native NVFP4 products. "
                "Fix: set recipe.emulate=auto to emulate, or recipe=fp8-hybrid or recipe=bf16."
            )
        note = (
            "EMULATED NVFP4 (this version has no native products): numbers as NVFP4 would give, and slower than bf16. "
            "recipe nvfp4 multiplies in e2m1 forward and backward; model_dtype is of what is between."
        )
        stochastic = not settings.no_fp4_stochastic_rounding
        return cls(four_over_six=options.four_over_six, stochastic=stochastic, note=note)


def multiply(a: Quantised, b: Quantised, rows: int, columns: int, inner: int, out: torch.dtype) -> Tensor:
    """a bᵀ, [rows, columns] in `out`, of matrices [rows, inner] and [columns, inner]."""
    product = a.blocks(rows, inner) @ b.blocks(columns, inner).t()
    return (product * (a.decode * b.decode)).to(out)


def pack(weight_OI: Tensor, slot: LinearSlot, options: Prepared) -> Tensor:
    """A frozen weight as bytes: tensor scale, then codes and block scales of it and of its transpose.

    A little more than one byte a parameter, for sides that are multiples of 16.
    """
    quantised = quantise(weight_OI, square=True, four_over_six=options.four_over_six)
    header = torch.zeros(HEADER // 4, dtype=torch.float32, device=weight_OI.device)
    header[0] = quantised.decode
    parts = [header.view(torch.uint8)]
    for layout in (quantised, quantised.t()):
        parts += [pack_codes(layout.codes).reshape(-1), layout.scales.contiguous().view(torch.uint8).view(-1)]
    return torch.cat(parts)


def unpack(packed: Tensor, outputs: int, inputs: int, *, transposed: bool) -> Quantised:
    """The weight [O, I], or its transpose, of what `pack` made."""
    p, q = (-(-n // BLOCK) * BLOCK for n in (outputs, inputs))
    start = HEADER
    if transposed:
        start, p, q = start + p * q // 2 + p * q // BLOCK**2, q, p
    middle, stop = start + p * q // 2, start + p * q // 2 + p * q // BLOCK**2
    codes = unpack_codes(packed[start:middle].view(p, q // 2))
    scales = packed[middle:stop].view(E4M3).view(p // BLOCK, q // BLOCK)
    return Quantised(codes, scales, packed[:4].view(torch.float32)[0])


def _bits(shape: torch.Size, seed: Tensor | None, number: int) -> Tensor | None:
    return None if seed is None else ops.random_bits(shape, seed, salt=FIRST_SALT + number)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight: Tensor, seed: Tensor | None, slot: TracedSlot, options: Prepared
    ) -> Tensor:
        tokens, outputs, inputs = x_NI.shape[0], slot.outputs, slot.inputs
        x = quantise(x_NI, square=False, four_over_six=options.four_over_six)
        if slot.packed:
            w = unpack(weight, outputs, inputs, transposed=False)
            ctx.save_for_backward(None, weight, None, None, seed)
        else:
            w = quantise(weight, square=True, four_over_six=options.four_over_six)
            ctx.save_for_backward(x_NI, w.codes, w.scales, w.decode, seed)
        ctx.slot, ctx.options, ctx.dtypes = slot, options, (x_NI.dtype, weight.dtype)
        return multiply(x, w, tokens, outputs, inputs, x_NI.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight, scales, decode, seed = ctx.saved_tensors
        slot, options = ctx.slot, ctx.options
        tokens, outputs, inputs = dy_NO.shape[0], slot.outputs, slot.inputs
        seed = seed if options.stochastic else None
        number = 2 * slot.index
        dy = quantise(dy_NO, square=False, four_over_six=options.four_over_six, bits=_bits(dy_NO.shape, seed, number))
        if slot.packed:
            w_t = unpack(weight, outputs, inputs, transposed=True)
        else:
            w_t = Quantised(weight, scales, decode).t()
        dtype_x, dtype_w = ctx.dtypes
        dx_NI = multiply(dy, w_t, tokens, inputs, outputs, dtype_x)
        dweight = None
        if ctx.needs_input_grad[1]:
            dy_ON, x_IN = hadamard(dy_NO.t()), hadamard(x_NI.t())
            bits = _bits(dy_ON.shape, seed, number + 1)
            a = quantise(dy_ON, square=False, four_over_six=False, bits=bits)
            b = quantise(x_IN, square=False, four_over_six=False)
            dweight = multiply(a, b, outputs, inputs, dy_ON.shape[1], dtype_w)
        return dx_NI, dweight, None, None, None


def linear(x_NI: Tensor, weight: Tensor, slot: TracedSlot, options: Prepared) -> Tensor:
    """y = x Wᵀ in x's dtype. `weight` is [O, I], or what `pack` made of it. No seed: gradients round to nearest."""
    y_NO: Tensor = _Linear.apply(x_NI, weight, slot.seed, slot, options)
    return y_NO
