"""The op `scaled_linears` on Hopper: FP8 products with the contribution of LoRA in the same sum, in CUDA C++.

One pass over a bf16 operand makes its codes and its largest value; one product multiplies it with all projections of a
panel. The skinny products are those of `surogate_native.adapters`. Shape suffixes as in `surogate_core.kernels.panels`,
C bytes of codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from surogate_native import adapters
from surogate_native.figures import FIGURES, begin, ends, padded
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from surogate_core.plugin import bundles, compute, fp8

SOURCES = compute.Sources.of(__file__, "surogate_native")
QUANTISE = compute.Module(SOURCES, "quantise", specific=True)
ENCODE = compute.Module(SOURCES, "encode")
ENCODE_BACKWARD = compute.Module(SOURCES, "encode_backward")
PRODUCT = compute.Module(SOURCES, "scaled_product", specific=True)
SHARED = 230_528
"""Bytes of shared memory of a product's block."""
THREADS = 384
ENCODED = 3
"""Largest number of projections whose u is computed together with the codes of their input."""
RANK = 16
"""Rank of the adapters whose skinny products are computed together with the codes."""
FILLED = 96
"""Blocks of 256 columns that keep a large Hopper reading; fixed, as `BLOCKS`."""
PROCESSORS = 132
"""Blocks that run at a time on it if each has 192 KiB of shared memory."""
DEEP = 16
"""Blocks of the inner dimension that are worth sharing out."""
BLOCKS = 264
"""Thread blocks that run at a time on a large Hopper; fixed, so that the order of sums depends only on shapes."""


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def quantised(
    x: Tensor, rows: Sequence[Tensor], widths: Sequence[int], margin: int, *, gradient: bool
) -> tuple[Tensor, Tensor]:
    """(codes in tiles, figures [S, 4]) of a bf16 matrix whose ranges of columns have a scale each."""
    n, width = x.shape[0], sum(widths)
    figures = begin(QUANTISE, x, rows, widths, margin, fp8.GRADIENT if gradient else fp8.ACTIVATION)
    codes_C = torch.empty(n * width, dtype=torch.uint8, device=x.device)
    QUANTISE.launch(
        "quantise_e5m2" if gradient else "quantise_e4m3",
        (width // fp8.TILE, n // fp8.TILE),
        256,
        x,
        x.stride(0),
        figures,
        codes_C,
        np.int32(n),
        *ends(widths),
    )
    return codes_C, figures


def encode(
    kernel: str, source: Sequence[Tensor | int], a_RI: Tensor, figures: Tensor, codes_C: Tensor, u_NR: Tensor
) -> None:
    """Codes, the largest value and u = x Aᵀ of rank 16, from one reading of the source."""
    tokens = 32
    ENCODE.launch(
        kernel,
        (u_NR.shape[0] // tokens,),
        512,
        *source,
        a_RI,
        figures,
        codes_C,
        u_NR,
        np.int32(a_RI.shape[1]),
        shared=16 * tokens * 17 * 4,
    )


def encode_gradient(
    dy: Tensor,
    u_NR: Tensor,
    b_OR: Tensor,
    rows: Sequence[Tensor],
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    scale: float,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(codes of dy, their figures, du, dB, counters of `adapters.summed`); dy may have more columns than outputs."""
    if rank != RANK:
        _, du_NR, db, counters = adapters.gradients(dy, u_NR, b_OR, inputs, outputs, rank, scale, joined=False)
        return *quantised(dy, rows, outputs, margin, gradient=True), du_NR, db, counters
    n, width, columns, step = dy.shape[0], sum(outputs), 256, 32
    figures = begin(QUANTISE, dy, rows, outputs, margin, fp8.GRADIENT)
    chunks = width // columns
    share = -(-n // (max(1, BLOCKS // chunks) * step)) * step
    parts = -(-n // share)
    codes_C = torch.empty(n * width, dtype=torch.uint8, device=dy.device)
    du_parts = torch.empty((chunks, n, rank), dtype=torch.float32, device=dy.device)
    db_parts = torch.empty((parts, width, rank), dtype=torch.float32, device=dy.device)
    ENCODE_BACKWARD.launch(
        "encode_backward",
        (chunks, parts),
        256,
        dy,
        dy.stride(0),
        u_NR,
        b_OR,
        np.int32(u_NR.shape[1]),
        *ends(outputs)[:3],
        figures,
        codes_C,
        du_parts,
        db_parts,
        *(np.int32(size) for size in (n, width, share)),
        shared=2 * 8 * step * (rank + 4) * 4,
    )
    du_NR, db, counters, _ = adapters.summed(du_parts, db_parts, None, inputs, outputs, rank, scale)
    return codes_C, figures, du_NR, db, counters


def product(
    codes_C: Tensor,
    figures: Tensor,
    weights: Sequence[Tensor],
    added: tuple[Tensor, Tensor] | None,
    out: Tensor,
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    *,
    gradient: bool,
    few: bool = False,
) -> None:
    """out = codes · weightᵀ, or codes · weight of a gradient, + u vᵀ of the bf16 pair `added`.

    `few`: whether blocks may be smaller and share a tile, so that few rows have enough of them to read a weight fast.
    """
    n, columns = out.shape
    u, v = added if added is not None else (out, out)
    steps = 0 if added is None else rank * (len(outputs) if gradient else 1) // 16
    tiles = n // 128 * (columns // 256)
    if few and tiles < FILLED:
        splits = _splits(2 * tiles, inputs // fp8.TILE)
        name, blocks = f"scaled_product_of_few_{splits}", 2 * tiles * splits
    else:
        name = "scaled_product_backward" if gradient else "scaled_product_forward"
        blocks = min(_processors(out.device), tiles)
    PRODUCT.launch(
        name,
        (blocks,),
        THREADS,
        codes_C,
        figures,
        *padded(weights, weights[0]),
        *ends(outputs)[:3],
        u,
        np.int32(u.stride(0)),
        v,
        np.int32(v.stride(0)),
        np.int32(rank),
        np.int32(steps),
        out,
        out.stride(0),
        np.int32(n),
        np.int32(inputs),
        np.int32(sum(outputs)),
        shared=SHARED,
    )


def _splits(tiles: int, blocks: int) -> int:
    """Blocks that share a tile of 128 columns. Four are slower: their sums take longer to add than is saved."""
    return 2 if blocks >= DEEP and 2 * tiles <= PROCESSORS else 1


def parts_of(panel: Tensor, inputs: int, outputs: Sequence[int], rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """A, Aᵀ and B of a panel; see `PanelShape.parts`."""
    shape = compute.PanelShape(
        inputs=inputs, outputs=tuple(outputs), rank=rank, scale=1.0, dropout=0.0, salts=(), frozen=False
    )
    return shape.parts(panel)


@compute.compiled_ahead
@torch.library.custom_op("surogate_hopper::scaled_linears", mutates_args=())
def _forward(
    x_NI: Tensor,
    panel: Tensor,
    weights: Sequence[Tensor],
    row: Tensor,
    seed: Tensor,
    outputs: Sequence[int],
    rank: int,
    margin: int,
    p: float,
    salts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    n, inputs = x_NI.shape
    if x_NI.stride(1) != 1:
        x_NI = x_NI.contiguous()
    a_RI, _, b_OR = parts_of(panel, inputs, outputs, rank)
    u_NR = x_NI.new_empty(n, rank * len(outputs))
    if p == 0 and rank == RANK and len(outputs) <= ENCODED:
        figures = begin(QUANTISE, x_NI, [row], [inputs], margin, fp8.ACTIVATION)
        codes_C = torch.empty(n * inputs, dtype=torch.uint8, device=x_NI.device)
        encode(f"encode_{len(outputs)}", (x_NI, x_NI.stride(0)), a_RI, figures, codes_C, u_NR)
    else:
        adapters.down(x_NI, a_RI, u_NR, u_NR, seed, len(outputs), p, salts)
        codes_C, figures = quantised(x_NI, [row], [inputs], margin, gradient=False)
    y = x_NI.new_empty(n, sum(outputs))
    product(codes_C, figures, weights, (u_NR, b_OR), y, inputs, outputs, rank, gradient=False)
    return y, u_NR, figures


@_forward.register_fake
def _(
    x_NI: Tensor,
    panel: Tensor,
    weights: Sequence[Tensor],
    row: Tensor,
    seed: Tensor,
    outputs: Sequence[int],
    rank: int,
    margin: int,
    p: float,
    salts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    n = x_NI.shape[0]
    figures = torch.empty((1, FIGURES), dtype=torch.float32, device=x_NI.device)
    return x_NI.new_empty(n, sum(outputs)), x_NI.new_empty(n, rank * len(outputs)), figures


@compute.compiled_ahead
@torch.library.custom_op("surogate_hopper::scaled_linears_of_few", mutates_args=())
def _forward_of_few(
    x_NI: Tensor, panel: Tensor, weights: Sequence[Tensor], row: Tensor, outputs: Sequence[int], rank: int, margin: int
) -> Tensor:
    """y of few rows without dropout or backward: as many blocks as a GPU has share each of its parts."""
    n, inputs = x_NI.shape
    if x_NI.stride(1) != 1:
        x_NI = x_NI.contiguous()
    a_RI, _, b_OR = parts_of(panel, inputs, outputs, rank)
    tiles = -(-n // fp8.TILE)
    u_NR, y = (x_NI.new_empty(tiles * fp8.TILE, width) for width in (rank * len(outputs), sum(outputs)))
    largest = adapters.down_few(x_NI, a_RI, u_NR, u_NR, len(outputs), largest=True)
    codes_C = torch.empty(tiles * fp8.TILE * inputs, dtype=torch.uint8, device=x_NI.device)
    figures = torch.empty((1, FIGURES), dtype=torch.float32, device=x_NI.device)
    QUANTISE.launch(
        "quantise_of_few",
        (inputs // fp8.TILE, tiles),
        256,
        x_NI,
        x_NI.stride(0),
        np.int32(n),
        row,
        largest,
        np.int32(largest.numel()),
        fp8.E4M3_MAX,
        2.0**-margin,
        figures,
        codes_C,
    )
    product(codes_C, figures, weights, (u_NR, b_OR), y, inputs, outputs, rank, gradient=False, few=True)
    return y[:n]


@_forward_of_few.register_fake
def _(
    x_NI: Tensor, panel: Tensor, weights: Sequence[Tensor], row: Tensor, outputs: Sequence[int], rank: int, margin: int
) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], sum(outputs))


@compute.compiled_ahead
@torch.library.custom_op("surogate_hopper::scaled_linears_backward", mutates_args=())
def _backward(
    dy: Tensor,
    x_NI: Tensor,
    u_NR: Tensor,
    panel: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    seed: Tensor,
    outputs: Sequence[int],
    rank: int,
    scale: float,
    margin: int,
    p: float,
    salts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # dy is [N, outputs or more]: what is past the gradients does not matter.
    n, inputs = x_NI.shape
    dy, x_NI = (t if t.stride(1) == 1 else t.contiguous() for t in (dy, x_NI))
    a_RI, a_IR, b_OR = parts_of(panel, inputs, outputs, rank)
    codes_C, figures, du_NR, db, counters = encode_gradient(dy, u_NR, b_OR, rows, inputs, outputs, rank, scale, margin)
    dx = x_NI.new_empty(n, inputs)
    added = (du_NR, a_IR) if p == 0 else None
    product(codes_C, figures, weights, added, dx, inputs, outputs, rank, gradient=True)
    if p == 0:
        return dx, adapters.down_gradient(x_NI, du_NR, counters), db, figures
    adapters.add_dropped(dx, du_NR, a_RI, seed, len(outputs), p, salts)
    return dx, adapters.dropped_gradient(x_NI, du_NR, seed, len(outputs), p, salts), db, figures


@_backward.register_fake
def _(
    dy: Tensor,
    x_NI: Tensor,
    u_NR: Tensor,
    panel: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    seed: Tensor,
    outputs: Sequence[int],
    rank: int,
    scale: float,
    margin: int,
    p: float,
    salts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, inputs = x_NI.shape
    return (
        x_NI.new_empty(n, inputs),
        x_NI.new_empty((rank * len(outputs), inputs), dtype=torch.float32),
        x_NI.new_empty((sum(outputs), rank), dtype=torch.float32),
        x_NI.new_empty((len(outputs), FIGURES), dtype=torch.float32),
    )


class _ScaledLinears(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        panel: Tensor,
        seed: Tensor,
        shape: compute.PanelShape,
        margin: int,
        p: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs, salts = list(shape.outputs), list(shape.salts)
        slots = len(outputs)
        weights, rows = tensors[:slots], tensors[slots : 2 * slots]
        y, u_NR, figures = _forward(x_NI, panel, list(weights), rows[0], seed, outputs, shape.rank, margin, p, salts)
        ctx.save_for_backward(x_NI, u_NR, figures, panel, seed, *weights, *rows)
        ctx.shape, ctx.margin, ctx.p = shape, margin, p
        return adapters.columns_of(y, outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, u_NR, figures_x, panel, seed, *tensors = ctx.saved_tensors
        shape: compute.PanelShape = ctx.shape
        n, outputs, salts = x_NI.shape[0], list(shape.outputs), list(shape.salts)
        slots = len(outputs)
        weights, rows = tensors[:slots], tensors[slots:]
        dy = dys[0]
        if slots > 1:
            # Joined as those of `adapted_linears` are, room included: the kernels that make the parts leave it to both.
            room = dy.new_empty(n, -(-shape.ranks // fp8.TILE), fp8.TILE)
            dy = torch.cat((*(dy.reshape(n, -1, fp8.TILE) for dy in dys), room), dim=1).view(n, -1)
        dx, da, db, figures = _backward(
            dy,
            x_NI,
            u_NR,
            panel,
            weights,
            rows,
            seed,
            outputs,
            shape.rank,
            shape.scale,
            ctx.margin,
            ctx.p,
            salts,
        )
        amax_x = figures_x[0, 2]
        observed = [torch.stack((amax_x, torch.zeros_like(amax_x), amax_dy)) for amax_dy in figures[:, 2].unbind(0)]
        split = zip(da.split(shape.rank), db.split(outputs), strict=True)
        return dx, *[None] * (5 + slots), *observed, *(g for pair in split for g in pair)


@register_flop_formula(torch.ops.surogate_hopper.scaled_linears)
def _flops(
    x_shape: Sequence[int],
    panel: Any,
    weights: Any,
    row: Any,
    seed: Any,
    outputs: Sequence[int],
    rank: int,
    *rest: Any,
    **named: Any,
) -> int:
    (n, inputs), ranks = x_shape, rank * len(outputs)
    return 2 * n * (sum(outputs) * (inputs + ranks) + inputs * ranks)


@register_flop_formula(torch.ops.surogate_hopper.scaled_linears_of_few)
def _flops_of_few(
    x_shape: Sequence[int],
    panel: Any,
    weights: Any,
    row: Any,
    outputs: Sequence[int],
    rank: int,
    *rest: Any,
    **named: Any,
) -> int:
    return _flops(x_shape, panel, weights, row, None, outputs, rank)


@compute.workspace(torch.ops.surogate_hopper.scaled_linears)
def _forward_bytes(x_NI: Tensor, *rest: Any) -> int:
    return x_NI.numel()


def encoded_bytes(n: int, outputs: Sequence[int], rank: int, results: int) -> int:
    """Most bytes of what `encode_gradient` allocates; `results`: bytes that its caller has as results afterwards."""
    width = sum(outputs)
    if rank != RANK:
        parts = adapters.parts_bytes(n, outputs, rank)
    else:
        chunks = width // 256
        share = -(-n // (max(1, BLOCKS // chunks) * 32)) * 32
        parts = 4 * rank * (chunks * n + width * -(-n // share))
    return n * width + max(parts - results, 0)


@compute.workspace(torch.ops.surogate_hopper.scaled_linears_backward)
def _backward_bytes(
    dy: Tensor,
    x_NI: Tensor,
    u_NR: Tensor,
    panel: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    seed: Tensor,
    outputs: Sequence[int],
    rank: int,
    *rest: Any,
) -> int:
    return encoded_bytes(dy.shape[0], outputs, rank, x_NI.numel() * x_NI.itemsize)


def scaled_linears(
    x: Tensor,
    panel: Tensor,
    seed: Tensor | None,
    shape: compute.PanelShape,
    margin: int,
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    *parameters: Tensor,
) -> Sequence[Tensor]:
    """`fp8.scaled_linears`; gradients of the adapters are fp32. FP8 sums stay within the tensor cores."""
    p = 0.0 if seed is None else shape.dropout
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *rows, *parameters))
    if p == 0 and x.shape[0] <= adapters.FEW and not differentiated:
        outputs = list(shape.outputs)
        y = torch.ops.surogate_hopper.scaled_linears_of_few(
            x, panel, list(weights), rows[0], outputs, shape.rank, margin
        )
        return adapters.columns_of(y, outputs)
    if seed is None:
        seed = torch.empty(0, dtype=torch.int32, device=x.device)  # not read; one element would be a launch
    n = x.shape[0]
    if rest := -n % fp8.TILE:
        x = pad(x, (0, 0, 0, rest))  # generation has any number of rows
    found: tuple[Tensor, ...] = _ScaledLinears.apply(x, panel, seed, shape, margin, p, *weights, *rows, *parameters)
    return [y_NO[:n] for y_NO in found] if rest else found


def _supports(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype == torch.bfloat16


def kernel() -> bundles.Kernel:
    """The kernel."""
    return bundles.Kernel(op="scaled_linears", name="hopper", function=scaled_linears, supports=_supports, priority=10)
