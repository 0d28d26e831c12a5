"""E4M3 with one scale for each row of an operand, for the experts of a mixture, and the product of all experts.

A row extends along the inner dimension of a product. Its scale is a power of two, computed from its own largest value
by integer arithmetic: every device computes the same codes, bf16 represents the values exactly, and a weight has the
same values in y = x Wᵀ as in dx = dy W, except where one of them underflows. A row with infinity or NaN gives NaN.

Suffixes: R rows sorted by expert, K the inner dimension, E experts, C columns of the result, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

from surogate_core.formats.fp8 import E4M3
from surogate_core.kernels.grouped import grouped_product, masked_product

SIDE = 16
"""Sides of a native product are multiples of this: TMA reads and writes at addresses that are multiples of 16 bytes."""
MOST_EXPERTS = 1023
"""The groups that torch's kernel supports."""
log = structlog.get_logger(__name__)

HEADER = 128
"""The codes of packed weights begin at a multiple of this many bytes."""


def row_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """(the scale, its inverse), fp32 powers of two: the largest scale with which amax stays within ±448.

    `amax`: largest absolute values. The inverse is NaN where amax is infinite or NaN.
    """
    bits = amax.float().view(torch.int32)
    # 448 = 1.75 · 2⁸: a mantissa above .75 needs the next exponent, into which this addition carries.
    exponent = (262 - ((bits + 0x1FFFFF) >> 23)).clamp(1, 253)
    scale = (exponent << 23).view(torch.float32)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return scale, torch.where(amax.isfinite(), inverse, torch.nan)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes E4M3 in the shape of x [..., K], the inverse scale of each row [...] fp32), rounded to nearest even."""
    scale, inverse = row_scales(x.abs().amax(-1))
    return (x.float() * scale[..., None]).to(E4M3), inverse


def row_values(codes: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of these codes, exact in fp32 and bf16."""
    return (codes.float() * inverse[..., None]).to(dtype)


# --------------------------------------------------------------------------- packed weights


def _sizes(experts: int, outputs: int, inputs: int) -> tuple[int, int]:
    """(bytes before the codes, bytes of the codes in one layout)."""
    scales = 4 * experts * (outputs + inputs)
    return -(-scales // HEADER) * HEADER, experts * outputs * inputs


def pack_experts(weights_EOI: Tensor) -> Tensor:
    """Frozen weights as bytes: the inverse scales of W's rows and of Wᵀ's, the codes of W, and those of Wᵀ."""
    experts, outputs, inputs = weights_EOI.shape
    start, size = _sizes(experts, outputs, inputs)
    packed = torch.zeros(start + 2 * size, dtype=torch.uint8, device=weights_EOI.device)
    wide, tall = packed_views(packed, experts, outputs, inputs)
    # One by one: all experts of a layer in fp32 are much larger than their codes.
    for number, weight_OI in enumerate(weights_EOI):
        for (codes, inverse), layout in ((wide, weight_OI), (tall, weight_OI.t())):
            found, scales = quantise_rows(layout)
            codes[number].view(torch.uint8).copy_(found.view(torch.uint8))
            inverse[number].copy_(scales)
    return packed


def packed_views(
    packed: Tensor, experts: int, outputs: int, inputs: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """((codes [E, O, I], inverse scales [E, O]), (codes [E, I, O], inverse scales [E, I])): views of what
    `pack_experts` made.
    """
    start, size = _sizes(experts, outputs, inputs)
    middle = 4 * experts * outputs
    found = []
    for rows, columns, scales, codes in (
        (outputs, inputs, packed[:middle], packed[start : start + size]),
        (inputs, outputs, packed[middle : middle + 4 * experts * inputs], packed[start + size :]),
    ):
        inverse = scales.view(torch.float32).view(experts, rows)
        found.append((codes.view(E4M3).view(experts, rows, columns), inverse))
    return found[0], found[1]


def packed_parts(experts: int, outputs: int, inputs: int) -> list[tuple[int, int]]:
    """(first byte, bytes of an expert) of each of the four tensors that are in what `pack_experts` made."""
    (start, size), each = _sizes(experts, outputs, inputs), outputs * inputs
    return [(0, 4 * outputs), (4 * experts * outputs, 4 * inputs), (start, each), (start + size, each)]


# --------------------------------------------------------------------------- the product


def fits(experts: int, *sides: int) -> bool:
    """Whether a native product supports these sides, both inner and outer."""
    return experts <= MOST_EXPERTS and all(side % SIDE == 0 for side in sides)


@torch.library.custom_op("surogate::fp8_grouped_product", mutates_args=())
def native_product(
    codes_RK: Tensor, inverse_R: Tensor, codes_ECK: Tensor, inverse_EC: Tensor, ends_E: Tensor, fast: bool
) -> Tensor:
    """[R, C] bf16: each row times its expert's matrix transposed, on FP8 tensor cores.

    On a CPU the values are multiplied in bf16. `fast`: tensor cores accumulate with fewer bits than fp32. Groups of
    rows may begin anywhere: only the inner dimension and the columns are multiples of 16 bytes (`fits`).
    """
    if codes_RK.device.type == "cpu":
        operands = row_values(codes_RK, inverse_R, torch.bfloat16), row_values(codes_ECK, inverse_EC, torch.bfloat16)
        return masked_product(*operands, ends_E)
    product: Tensor = torch._scaled_grouped_mm(
        codes_RK,
        codes_ECK.transpose(1, 2),
        inverse_R,
        inverse_EC,
        offs=ends_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return product


@native_product.register_fake
def _(codes_RK: Tensor, inverse_R: Tensor, codes_ECK: Tensor, inverse_EC: Tensor, ends_E: Tensor, fast: bool) -> Tensor:
    return codes_RK.new_empty(codes_RK.shape[0], codes_ECK.shape[1], dtype=torch.bfloat16)


@register_flop_formula(torch.ops.surogate.fp8_grouped_product)
def _flops(codes_shape: Sequence[int], inverse: Any, weights_shape: Sequence[int], *others: Any, **named: Any) -> int:
    return 2 * codes_shape[0] * weights_shape[1] * weights_shape[2]


@cache
def fault(device: torch.device) -> str | None:
    """Why the native product is not used on a device of SM90, which the log says too, or None: products of uneven
    groups, some empty and none a multiple of 16, are compared with emulated ones.
    """
    reason = _wrong(device)
    if reason is not None:
        log.warning("fp8_grouped_product", product="emulated", reason=reason)
    return reason


def _wrong(device: torch.device) -> str | None:
    with torch.no_grad(), _disable_current_modes():
        generator = torch.Generator().manual_seed(0)
        ends_E = torch.tensor([0, 70, 70, 71, 519, 605, 605], dtype=torch.int32)
        x, weights, dy = (
            torch.randn(shape, generator=generator).bfloat16() for shape in ((605, 96), (7, 176, 96), (605, 176))
        )
        wide, tall = packed_views(pack_experts(weights), *weights.shape)
        for what, rows, operand, fast in (("x Wᵀ", x, wide, True), ("dy W", dy, tall, False)):
            operands = *quantise_rows(rows), *operand
            wanted = native_product(*operands, ends_E, fast).float()
            try:
                found = native_product(*(t.to(device) for t in (*operands, ends_E)), fast).float().cpu()
            except RuntimeError as error:
                return f"torch's grouped FP8 product fails: {str(error).splitlines()[0]}"
            if not torch.allclose(found, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max())):
                return f"torch's grouped FP8 product gives a wrong {what}"
    return None


def emulated_product(
    rows: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], ends_E: Tensor, dtype: torch.dtype
) -> Tensor:
    """[R, C] in `dtype` from (codes, inverse scales) of both operands, equal to the native product but for the rounding
    of its sums.
    """
    return grouped_product(row_values(*rows, dtype), row_values(*weights, dtype), ends_E)
