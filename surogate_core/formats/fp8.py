"""FP8 with one scale a tensor: its formulas, and the op that multiplies adapted projections so.

A scale multiplies a value before it is rounded to FP8 (formats: arXiv 2209.05433). Scales are delayed (Transformer
Engine's `DelayedScaling`): a row of [activation, weight, gradient] scales is computed from earlier steps, and 0 means
that there is none yet. Suffixes as in `surogate_core.kernels.panels`, O outputs of one projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.kernels.ops import dropout_mask_of_rows
from surogate_core.kernels.panels import PanelShape
from surogate_core.kernels.registry import op

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_MAX = 448.0
E5M2_MAX = 57344.0
FP32_MAX = torch.finfo(torch.float32).max
LIMIT = {E4M3: E4M3_MAX, E5M2: E5M2_MAX}
ACTIVATION, WEIGHT, GRADIENT = range(3)
"""Columns of a row."""

TILE = 128
"""Rows of a tile of codes, and its columns."""
CHUNK, ORDERS = 16, 8
"""Codes that stay together, and the orders in which a tile's rows have their chunks."""
HEADER = 128
"""Bytes before the codes of a packed weight: the inverse of its scale, and the alignment of what follows."""
MOST_RANKS = 64
"""The ranks of a panel's adapters together."""


def amax_of(x: Tensor) -> Tensor:
    """0-d fp32: the largest absolute value; NaN where there is one."""
    return x.abs().amax().float()


def scale_of(amax: Tensor, limit: Tensor | float, *, margin: int, old: Tensor | float) -> Tensor:
    """(limit / amax) / 2^margin in fp32; `old` where amax is 0, inf or NaN; fp32's largest where it overflows."""
    # A number divided by a tensor is its reciprocal times the number in torch: one more rounding.
    wide = limit if isinstance(limit, Tensor) else torch.full_like(amax, limit)
    scale = (wide / amax) * 2.0**-margin
    scale = torch.where(torch.isinf(scale), FP32_MAX, scale)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, old)


def scale_in_use(row: Tensor, role: int, amax: Tensor, kind: torch.dtype, margin: int) -> Tensor:
    """The delayed scale of a role; before there is one, that of the tensor's own largest value, or 1."""
    return torch.where(row[role] > 0, row[role], scale_of(amax, LIMIT[kind], margin=margin, old=1.0))


def quantise(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """x · scale in fp32, saturated and rounded to nearest, ties to even. Infinity saturates, NaN stays."""
    return (x.float() * scale).clamp(-LIMIT[kind], LIMIT[kind]).to(kind)


KIND = {ACTIVATION: E4M3, WEIGHT: E4M3, GRADIENT: E5M2}
"""Format of a role."""


@op
def quantise_both(x_RC: Tensor, row: Tensor, role: int, margin: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix and its transpose as codes by the delayed scale of a role: for a tensor that two products read.

    (codes [R, C], codes [C, R] contiguous, largest absolute value 0-d fp32, 1 / scale 0-d fp32).
    """
    amax = amax_of(x_RC)
    scale = scale_in_use(row, role, amax, KIND[role], margin)
    codes_RC = quantise(x_RC, scale, KIND[role])
    return codes_RC, codes_RC.t().contiguous(), amax, 1 / scale


# --------------------------------------------------------------------------- tiles


def _swapped(tiles: Tensor) -> Tensor:
    """Chunk c of row r exchanged with chunk c ^ (r % 8), in [..., 128, 8, 16]: done twice it is undone."""
    rows = torch.arange(TILE, device=tiles.device)[:, None]
    chunks = torch.arange(TILE // CHUNK, device=tiles.device)[None, :]
    return tiles[..., rows, chunks ^ (rows % ORDERS), :]


def tiled(bytes_RC: Tensor) -> Tensor:
    """A matrix of bytes, both sides multiples of 128, as tiles [R/128, C/128, 128 · 128] in one row of bytes.

    A tile is contiguous, in the order in which wgmma reads it from shared memory with a swizzle of 128 bytes: row by
    row, the chunk c of 16 bytes of row r at c ^ (r % 8).
    """
    rows, columns = bytes_RC.shape
    tiles = bytes_RC.reshape(rows // TILE, TILE, columns // TILE, TILE // CHUNK, CHUNK).transpose(1, 2)
    return _swapped(tiles).reshape(-1)


def untiled(flat: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix [rows, columns] of these tiles; the inverse of `tiled`."""
    tiles = flat.view(rows // TILE, columns // TILE, TILE, TILE // CHUNK, CHUNK)
    return _swapped(tiles).transpose(1, 2).reshape(rows, columns)


def fits(shape: PanelShape, tokens: int) -> bool:
    """Whether `scaled_linears` supports such a panel, trained with this number of tokens."""
    sides = (shape.inputs, *shape.outputs)
    return tokens % TILE == 0 and all(n % (2 * TILE) == 0 for n in sides) and shape.ranks <= MOST_RANKS


def pack(weight_OI: Tensor, margin: int) -> Tensor:
    """A frozen weight as bytes [128 + 2·O·I]: 1 / its scale as fp32, its e4m3 codes in tiles, and its transpose's."""
    scale = scale_of(amax_of(weight_OI), E4M3_MAX, margin=margin, old=1.0)
    codes_OI = quantise(weight_OI, scale, E4M3).view(torch.uint8)
    header = torch.zeros(HEADER // 4, dtype=torch.float32, device=weight_OI.device)
    header[0] = 1 / scale
    return torch.cat((header.view(torch.uint8), tiled(codes_OI), tiled(codes_OI.t())))


def unpack(packed: Tensor, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """(codes [O, I], 1 / scale 0-d) of what `pack` made."""
    codes = untiled(packed[HEADER : HEADER + outputs * inputs], outputs, inputs)
    return codes.view(E4M3), packed[:4].view(torch.float32)[0]


# --------------------------------------------------------------------------- the op


class _ScaledLinears(Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, panel: Tensor, seed_2: Tensor | None, shape: PanelShape, margin: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        slots = len(shape.outputs)
        weights, rows = tensors[:slots], tensors[slots : 2 * slots]
        amax_x = amax_of(x_NI)
        scale_x = scale_in_use(rows[0], ACTIVATION, amax_x, E4M3, margin)
        codes_NI = quantise(x_NI, scale_x, E4M3)
        inverse_x = 1 / scale_x
        ys, us = [], []
        for number, (packed, outputs) in enumerate(zip(weights, shape.outputs, strict=True)):
            codes_OI, inverse_w = unpack(packed, outputs, shape.inputs)
            a_RI, b_OR = shape.adapter(panel, number)
            u_NR = _dropped(x_NI, seed_2, shape, number) @ a_RI.t()
            y_NO = (codes_NI.float() @ codes_OI.float().t()) * (inverse_x * inverse_w)
            ys.append((y_NO + u_NR.float() @ b_OR.float().t()).to(x_NI.dtype))
            us.append(u_NR)
        ctx.save_for_backward(x_NI, panel, seed_2, amax_x, *weights, *rows, *us)
        ctx.shape, ctx.margin = shape, margin
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, panel, seed_2, amax_x, *tensors = ctx.saved_tensors
        shape: PanelShape = ctx.shape
        slots = len(shape.outputs)
        weights, rows, us = tensors[:slots], tensors[slots : 2 * slots], tensors[2 * slots :]
        dx = torch.zeros(x_NI.shape, dtype=torch.float32, device=x_NI.device)
        observed: list[Tensor | None] = []
        adapters: list[Tensor] = []
        for number, (dy_NO, outputs, row) in enumerate(zip(dys, shape.outputs, rows, strict=True)):
            amax_dy = amax_of(dy_NO)
            scale_dy = scale_in_use(row, GRADIENT, amax_dy, E5M2, ctx.margin)
            codes_OI, inverse_w = unpack(weights[number], outputs, shape.inputs)
            codes_NO = quantise(dy_NO, scale_dy, E5M2)
            dx += (codes_NO.float() @ codes_OI.float()) * ((1 / scale_dy) * inverse_w)
            a_RI, b_OR = shape.adapter(panel, number)
            du_NR = dy_NO @ b_OR
            through = du_NR.float() @ a_RI.float()
            if seed_2 is not None and shape.dropout > 0:
                mask = dropout_mask_of_rows(x_NI, seed_2, salt=shape.salts[number], p=shape.dropout)
                through = through * mask * (1 / (1 - shape.dropout))
            dx += through
            adapters.append(du_NR.float().t() @ _dropped(x_NI, seed_2, shape, number).float())
            adapters.append(shape.scale * (dy_NO.float().t() @ us[number].float()))
            observed.append(torch.stack((amax_x, torch.zeros_like(amax_x), amax_dy)))
        unasked: list[Tensor | None] = [None] * slots
        return dx.to(x_NI.dtype), None, None, None, None, *unasked, *observed, *adapters


def _dropped(x_NI: Tensor, seed_2: Tensor | None, shape: PanelShape, number: int) -> Tensor:
    if seed_2 is None or shape.dropout == 0:
        return x_NI
    mask = dropout_mask_of_rows(x_NI, seed_2, salt=shape.salts[number], p=shape.dropout)
    return x_NI * mask * (1 / (1 - shape.dropout))


@op
def scaled_linears(
    x_NI: Tensor,
    panel: Tensor,
    seed_2: Tensor | None,
    shape: PanelShape,
    margin: int,
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    *adapters: Tensor,
) -> Sequence[Tensor]:
    """Projections of one input with their LoRA adapters: y = x Wᵀ in FP8 + scale · dropout(x) Aᵀ Bᵀ for each.

    Each output is one sum, rounded once to x's dtype; x has any number of rows, as generation has. `weights` are made
    by `pack`, `rows` [3] fp32 have the delayed scales; all projections share x, and the first row's scale of x is used.
    dx = dy W in e5m2 × e4m3. The gradient of a row contains the largest absolute values of x and dy, and 0. `panel` has
    the adapters in x's dtype (`shape.frozen` is False), `adapters` are the tensors that receive gradients, as in
    `ops.adapted_linears`; so is `seed_2`.
    """
    found: tuple[Tensor, ...] = _ScaledLinears.apply(x_NI, panel, seed_2, shape, margin, *weights, *rows, *adapters)
    return found
