"""NVFP4 products on tensor cores, through torch's block-scaled matrix product (cuBLASLt, SM100 and newer).

Suffixes: R and C rows and columns of a product, K its inner dimension, B = K/16 blocks. Two codes are a byte, the first
in its low half. The scales of an operand are in tiles of 128 rows by 4 blocks, in order along a row of tiles; in a tile
of 512 bytes the scale of row r and block b is at (r mod 32)·16 + (r div 32)·4 + b (cuBLAS documentation, "1D Block
Scaling Factors Layout").
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from surogate_core.plugin import nvfp4

TILE_ROWS, TILE_BLOCKS = 128, 4
MULTIPLE = 32
"""Divisor of the sides of a product: 16 bytes of codes along K, and 16 columns of bf16, for all three products of a
slot.
"""


def fits(*sides: int) -> bool:
    """Whether products of these sides run natively; each of them is the inner dimension of one product."""
    return all(side % MULTIPLE == 0 for side in sides)


def by_row(scales: Tensor, rows: int) -> Tensor:
    """[R, B] of the scales of blocks of 1×16 or 16×16."""
    return scales if scales.shape[0] == rows else scales.repeat_interleave(nvfp4.BLOCK, 0)


def swizzled(scales_RB: Tensor) -> Tensor:
    """1-D E4M3, the scales in the order of the tensor cores; the last tiles are padded with 0."""
    rows, blocks = scales_RB.shape
    padding = (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS)
    padded = pad(scales_RB.view(torch.uint8), padding)
    tiles = padded.view(-1, 4, 32, padded.shape[1] // TILE_BLOCKS, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(nvfp4.E4M3)


def unswizzled(scales: Tensor, rows: int, blocks: int) -> Tensor:
    """[R, B] from the result of `swizzled`."""
    tile_rows, tile_columns = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    tiles = scales.view(torch.uint8).view(tile_rows, tile_columns, 32, 4, TILE_BLOCKS)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(tile_rows * TILE_ROWS, tile_columns * TILE_BLOCKS)
    return padded[:rows, :blocks].contiguous().view(nvfp4.E4M3)


RECIPE = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
ORDER = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]


def scaled_product(
    a_codes: Tensor, a_scales: Tensor, a_decode: Tensor, b_codes: Tensor, b_scales: Tensor, b_decode: Tensor
) -> Tensor:
    """a bᵀ, [R, C] bf16, of operands as packed codes [R, K/2] and [C, K/2], swizzled scales and factors (0-d fp32)."""
    return scaled_mm(
        a_codes.view(torch.float4_e2m1fn_x2),
        b_codes.view(torch.float4_e2m1fn_x2).t(),
        scale_a=[a_scales, a_decode],
        scale_recipe_a=RECIPE,
        scale_b=[b_scales, b_decode],
        scale_recipe_b=RECIPE,
        swizzle_a=ORDER,
        swizzle_b=ORDER,
        output_dtype=torch.bfloat16,
    )


product = torch.library.custom_op("surogate::nvfp4_product", scaled_product, mutates_args=())
"""`scaled_product` as a separate op, so that no compiler needs to support the packed dtype."""


@product.register_fake
def _(
    a_codes: Tensor, a_scales: Tensor, a_decode: Tensor, b_codes: Tensor, b_scales: Tensor, b_decode: Tensor
) -> Tensor:
    return a_codes.new_empty(a_codes.shape[0], b_codes.shape[0], dtype=torch.bfloat16)
