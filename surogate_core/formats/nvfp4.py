"""NVFP4: E2M1 codes in blocks with E4M3 scales, and one fp32 scale per tensor (arXiv 2509.25149).

Suffixes: R rows, K the inner dimension of a product, along which blocks of 16 extend; P and Q are R and K rounded up to
a multiple of 16; E matrices of one kind, such as a mixture's experts, each with a tensor scale. All arithmetic is fp32
unless stated otherwise, in an explicit order, so that a kernel can give the same bits. Constants are computed rather
than stored, so that a traced graph contains none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from surogate_core.formats import fp4
from surogate_core.kernels.ops import random_bits
from surogate_core.kernels.registry import op

BLOCK = 16
E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max
E4M3 = torch.float8_e4m3fn

BELOW, ABOVE = 4, 6
"""How many E4M3 numbers below and above a block's usual scale `searched` tries: from 2/3 to 3/2 of it or a little
more. A smaller scale clips the largest values and rounds the others more finely.
"""
LARGEST_BITS = 0x7E
"""The bits of the largest E4M3 number."""

MINUS = (3, 5, 6, 7, 8, 9, 10, 12, 14, 15)
"""Where the random sign vector S of the Hadamard transform is −1."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix [R, K] in NVFP4, or several [E, R, K], padded with zeros."""

    codes: Tensor
    """[R or P, Q] uint8: bits 0–2 the number of the magnitude in 0, ½, 1, 1½, 2, 3, 4, 6, bit 3 the sign."""
    scales: Tensor
    """[R, Q/16] or [P/16, Q/16] E4M3, of blocks of 1×16 or 16×16."""
    decode: Tensor
    """0-d fp32, or [E]: what all of a matrix is multiplied by."""

    def blocks(self, rows: int, inner: int) -> Tensor:
        """[..., rows, inner] fp32: codes times block scales, exact, in bf16 too; times `decode` it is the matrix."""
        height = self.codes.shape[-2] // self.scales.shape[-2]
        scales = self.scales.float().repeat_interleave(height, -2).repeat_interleave(BLOCK, -1)
        return (fp4.values(self.codes) * scales)[..., :rows, :inner]

    def t(self) -> Quantised:
        """The transpose, where blocks are square."""
        return Quantised(self.codes.t(), self.scales.t(), self.decode)


def _tensor_scale(amax: Tensor, top: float) -> Tensor:
    """s_enc = top / amax: 1 where amax is 0 or inf, fp32's largest where it overflows; NaN stays."""
    scale = torch.full_like(amax, top) / amax
    scale = torch.where(torch.isposinf(scale), FP32_MAX, scale)
    return torch.where((amax == 0) | torch.isposinf(amax), 1.0, scale)


def _tiles(x_PQ: Tensor, height: int) -> Tensor:
    """[..., rows of blocks, blocks of a row, height, 16]."""
    *lead, rows, inner = x_PQ.shape
    return x_PQ.reshape(*lead, rows // height, height, inner // BLOCK, BLOCK).transpose(-3, -2)


def _untiled(tiles: Tensor) -> Tensor:
    *lead, rows, blocks, height, width = tiles.shape
    return tiles.transpose(-3, -2).reshape(*lead, rows * height, blocks * width)


def _of_blocks(scale: Tensor) -> Tensor:
    """The scale of each matrix as the blocks [..., P, Q/16] of the matrices take it."""
    return scale if scale.ndim == 0 else scale[..., None, None]


def _block_scales(unrounded: Tensor) -> Tensor:
    """E4M3; a NaN is always the same one."""
    scales = unrounded.clamp(-E4M3_MAX, E4M3_MAX)
    return torch.where(scales.isnan(), torch.nan, scales).to(E4M3)


def _folded(x: Tensor) -> Tensor:
    """The sum over the last dimension, a power of two: halves added until one is left."""
    while x.shape[-1] > 1:
        upper, lower = x.chunk(2, dim=-1)
        x = upper + lower
    return x[..., 0]


def _block_errors(tiles: Tensor, codes: Tensor, scales: Tensor, decode: Tensor) -> Tensor:
    """The squared error of each block in fp64; of square ones the same bits for the transpose."""
    # By way of fp32, which is exact: Triton has no conversion of E4M3 to fp64.
    found = fp4.values(codes).double() * (scales.float().double() * _of_blocks(decode.double()))[..., None, None]
    errors = (found - tiles.double()).square()
    if errors.shape[-2] == BLOCK:
        errors = errors + errors.transpose(-1, -2)
    return _folded(_folded(errors))


def _encode_blocks(tiles: Tensor, scales: Tensor, decode: Tensor, bits: Tensor | None) -> Tensor:
    """Codes of tiles at their block scales; 0 in a block whose scale is 0."""
    divisor = (scales.float() * _of_blocks(decode))[..., None, None]
    ratio = torch.where(divisor == 0, 0.0, tiles / torch.where(divisor == 0, 1.0, divisor))
    return fp4.encode(ratio, bits)


def searched(tiles: Tensor, s_enc: Tensor) -> tuple[Tensor, Tensor]:
    """(codes of the tiles, their block scales). Each block gets the E4M3 scale with the smallest squared error among
    its usual one, which scales its largest value to 6, `BELOW` numbers below it and `ABOVE` numbers above it.

    Four-over-six's two are among them. `tiles`: [..., height, 16]. `s_enc`: 1536 / amax, 0-d or of each matrix [E];
    every candidate is in range.
    """
    decode = 1 / s_enc
    six = _block_scales(tiles.abs().amax((-1, -2)) / fp4.LARGEST * _of_blocks(s_enc))
    # The bits of positive E4M3 numbers are in their order.
    own = six.view(torch.uint8).int()
    best = codes = chosen = None
    for step in sorted(range(-BELOW, ABOVE + 1), key=abs):
        near = (own + step).clamp(0, LARGEST_BITS)
        scales = torch.where(own > LARGEST_BITS, own, near).to(torch.uint8).view(E4M3)  # NaN stays
        found = _encode_blocks(tiles, scales, decode, None)
        errors = _block_errors(tiles, found, scales, decode)
        if best is None or codes is None or chosen is None:
            best, codes, chosen = errors, found, scales.float()
            continue
        smaller = errors < best
        best = torch.where(smaller, errors, best)
        codes = torch.where(smaller[..., None, None], found, codes)
        chosen = torch.where(smaller, scales.float(), chosen)
    assert codes is not None
    assert chosen is not None
    return codes, chosen.to(E4M3)


def quantise(
    x_RK: Tensor, *, square: bool, four_over_six: bool, bits: Tensor | None = None, search: bool = False
) -> Quantised:
    """Round a matrix, or several [E, R, K] of which each has a tensor scale, to NVFP4 in blocks of 16×16 (`square`) or
    1×16.

    `bits`: [R, K] int32 for stochastic rounding. `four_over_six` (arXiv 2512.02010) scales a block to 4 where
    that has a strictly smaller squared error, both rounded to nearest: a choice that depended on the random
    bits would bias the mean. Errors are summed in fp64. `search` chooses scales by `searched`, to nearest.
    """
    assert not (search and bits is not None)
    rows, inner = x_RK.shape[-2:]
    height = BLOCK if square else 1
    padding = (0, -inner % BLOCK, 0, -rows % height)
    tiles = _tiles(pad(x_RK.float(), padding), height)
    tiled_bits = None if bits is None else _tiles(pad(bits, padding), height)
    amax_blocks = tiles.abs().amax((-1, -2))
    top = 1536.0 if four_over_six or search else E4M3_MAX * fp4.LARGEST
    s_enc = _tensor_scale(amax_blocks.amax((-2, -1)), top)
    decode = 1 / s_enc
    if search:
        codes, scales = searched(tiles, s_enc)
        return Quantised(_untiled(codes), scales, decode)
    s_enc = _of_blocks(s_enc)
    # By a tensor: on a GPU a division by a number is a product with its reciprocal.
    six = torch.full_like(amax_blocks, fp4.LARGEST)
    if not four_over_six:
        scales = _block_scales(amax_blocks * s_enc / six)
        return Quantised(_untiled(_encode_blocks(tiles, scales, decode, tiled_bits)), scales, decode)
    unrounded = amax_blocks / six * s_enc
    candidates = [_block_scales(unrounded * factor) for factor in (1.0, 1.5)]
    nearest = [_encode_blocks(tiles, scales, decode, None) for scales in candidates]
    errors = [_block_errors(tiles, codes, scales, decode) for codes, scales in zip(nearest, candidates, strict=True)]
    take_four = errors[1] < errors[0]
    # torch.where does not take float8.
    chosen = torch.where(take_four, candidates[1].float(), candidates[0].float()).to(E4M3)
    if tiled_bits is None:
        codes = torch.where(take_four[..., None, None], nearest[1], nearest[0])
    else:
        codes = _encode_blocks(tiles, chosen, decode, tiled_bits)
    return Quantised(_untiled(codes), chosen, decode)


def hadamard(x_RK: Tensor) -> Tensor:
    """x · H in groups of 16 along K, padded with zeros: H = ¼ · diag(S) · H₁₆ (Sylvester), orthogonal. [R, Q] fp32."""
    rows, inner = x_RK.shape
    x = pad(x_RK.float(), (0, -inner % BLOCK)).reshape(-1, BLOCK)
    mask = sum(1 << i for i in MINUS)
    x = x * (1 - 2 * ((mask >> torch.arange(BLOCK, device=x.device)) & 1))
    for width in (1, 2, 4, 8):
        pairs = x.view(-1, BLOCK // (2 * width), 2, width)
        upper, lower = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack((upper + lower, upper - lower), dim=2).view(-1, BLOCK)
    return (x * 0.25).view(rows, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """The role of a matrix as an operand of a product."""

    square: bool = False
    """Blocks of 16×16 instead of 1×16, rounded to nearest: the transpose has the same values."""
    four_over_six: bool = False
    transposed: bool = False
    """The transpose of the matrix is the operand."""
    rotated: bool = False
    """The operand is rotated by `hadamard`, so that its inner dimension is Q."""
    salt: int = 0
    """Separates the random bits of operands."""


def _operand(x: Tensor, seed: Tensor | None, how: Operand) -> tuple[Quantised, tuple[int, int]]:
    """The operand padded, and its own shape."""
    assert not (how.square and (how.rotated or seed is not None))
    if how.square:
        found = quantise(x, square=True, four_over_six=how.four_over_six)
        rows, inner = x.shape
        return (found.t(), (inner, rows)) if how.transposed else (found, (rows, inner))
    x_RK = x.t() if how.transposed else x
    if how.rotated:
        x_RK = hadamard(x_RK)
    rows, inner = x_RK.shape
    bits = None
    if seed is not None:
        width = inner + -inner % BLOCK
        bits = random_bits(torch.Size((rows, width)), seed, salt=how.salt)[:, :inner]
    return quantise(x_RK, square=False, four_over_six=how.four_over_six, bits=bits), (rows, inner)


@op
def nvfp4_quantised(x: Tensor, seed: Tensor | None, how: Operand) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix as an operand in NVFP4: (codes, scales, decode), as in `Quantised` but with packed codes.

    `seed` (0-d int32) rounds stochastically: the bits are a function of it, `how.salt` and the element's
    number in the operand [R, Q] (`random_bits`). Codes are [R, Q/2] uint8, [P, Q/2] of square blocks.
    """
    found, _ = _operand(x, seed, how)
    return fp4.pairs(found.codes), found.scales.contiguous(), found.decode


@op
def nvfp4_rounded(x: Tensor, seed: Tensor | None, how: Operand) -> tuple[Tensor, Tensor]:
    """The values of `nvfp4_quantised`: (codes times block scales [R, K or Q] bf16, exact; decode)."""
    found, (rows, inner) = _operand(x, seed, how)
    return found.blocks(rows, inner).bfloat16(), found.decode
