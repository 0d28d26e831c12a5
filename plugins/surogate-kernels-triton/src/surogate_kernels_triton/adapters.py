"""The op `adapted_linears` on panels: cuBLAS for the wide products, Triton for the skinny ones.

What the adapters add to a product is a few more columns of its inner dimension: u stands past x in
its own rows and scale·B past W, so that y takes no second pass; likewise du past dy, and A below W.
Shape suffixes as in `surogate_core.kernels.panels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from surogate_core.bundles import Kernel
from surogate_core.kernels.panels import PanelShape
from surogate_core.kernels.registry import workspace
from surogate_kernels_triton import adapters_programs as programs

ROWS = 1024
"""Tokens whose contributions to a gradient one program adds, at most."""
ROOM = 128
"""Columns past x are a multiple of this."""
COLUMNS = 64
"""Inputs of a program of `down_gradient`."""
PROGRAMS = 240
"""As many as keep a large GPU reading; fixed, so that the order of sums depends on shapes alone."""
GOLDEN = 0x1E3779B9
"""What `ops.dropout_mask` multiplies a salt by."""
_salts: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _keys(salts: Sequence[int], device: torch.device) -> Tensor:
    """Each projection's share of the dropout key, [S] int32; made once, so that graphs may be captured."""
    key = device, tuple(salts)
    if key not in _salts:
        _salts[key] = torch.tensor([_int32(s * GOLDEN) for s in salts], dtype=torch.int32, device=device)
    return _salts[key]


def _chunk(outputs: Sequence[int], most: int) -> int:
    """The largest power of two up to `most` that divides every projection's outputs."""
    size = most
    while any(o % size for o in outputs):
        size //= 2
    return size


def _cut(outputs: Sequence[int], tokens: int) -> tuple[int, int]:
    """Outputs and tokens of a program of `up_backward`."""
    chunk, rows = _chunk(outputs, 256), ROWS
    while rows > 256 and sum(outputs) // chunk * triton.cdiv(tokens, rows) < PROGRAMS:
        rows //= 2
    if chunk > 128 and sum(outputs) // chunk * triton.cdiv(tokens, rows) < PROGRAMS:
        chunk //= 2
    return chunk, rows


def _ends(outputs: Sequence[int]) -> list[int]:
    """Where the first three projections end; past the panel where there are fewer."""
    ends = [sum(outputs[: i + 1]) for i in range(min(3, len(outputs) - 1))]
    return ends + [2**30] * (3 - len(ends))


def _named_ends(outputs: Sequence[int]) -> dict[str, int]:
    return dict(zip(("E0", "E1", "E2"), _ends(outputs), strict=True))


def _dropout(p: float, seed: Tensor, salts: Sequence[int]) -> tuple[Any, ...]:
    threshold = round(p * 2**32) - 2**31
    return seed, _keys(salts, seed.device), threshold, 1 / (1 - p)


def down(
    x: Tensor, a_RI: Tensor, u_NR: Tensor, room: Tensor, seed: Tensor, slots: int, p: float, salts: Sequence[int]
) -> None:
    """u = dropout(x) Aᵀ of all projections into `u_NR` and into `room`; x may have more columns than A."""
    n, inputs = x.shape[0], a_RI.shape[1]
    tile, step = (64, 128) if slots > 1 else (32, 256)
    programs.down[triton.cdiv(n, tile) * slots,](
        x,
        a_RI,
        u_NR,
        room,
        *_dropout(p, seed, salts),
        n,
        x.stride(0),
        a_RI.stride(0),
        room.stride(0),
        IN=inputs,
        R=a_RI.shape[0] // slots,
        S=slots,
        M=tile,
        K=step,
        DROP=p > 0,
        num_warps=4,
        num_stages=5,
    )


@torch.library.custom_op("surogate_triton::adapted_linears", mutates_args=())
def _forward(
    x: Tensor,
    panel_QP: Tensor,
    seed: Tensor,
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    p: float,
    salts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    # x is [N, I + ranks or more]: u is written past x; nobody else reads it.
    n, width, ranks = x.shape[0], sum(outputs), rank * len(outputs)
    if x.stride(1) != 1:
        x = x.contiguous()
    u_NR = x.new_empty(n, ranks)
    down(x, panel_QP[width:, :inputs], u_NR, x[:, inputs:], seed, len(outputs), p, salts)
    return torch.mm(x[:, : inputs + ranks], panel_QP[:width, : inputs + ranks].t()), u_NR


@_forward.register_fake
def _(
    x: Tensor,
    panel_QP: Tensor,
    seed: Tensor,
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    p: float,
    salts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], sum(outputs)), x.new_empty(x.shape[0], rank * len(outputs))


@register_flop_formula(torch.ops.surogate_triton.adapted_linears)
def _flops(
    x_shape: Sequence[int],
    panel: Any,
    seed: Any,
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    *rest: Any,
    **named: Any,
) -> int:
    ranks = rank * len(outputs)
    return 2 * x_shape[0] * (sum(outputs) * (inputs + ranks) + inputs * ranks)


def parts_bytes(n: int, outputs: Sequence[int], rank: int) -> int:
    """Bytes of the partial sums of du and dB in `gradients`."""
    chunk, rows = _cut(outputs, n)
    return 4 * sum(outputs) * rank * triton.cdiv(n, rows) + 4 * sum(outputs) // chunk * n * rank


def gradients_bytes(dy: Tensor, outputs: Sequence[int], rank: int, results: int) -> int:
    """Most bytes of what `gradients` allocates; `results`: bytes that its caller has as results only afterwards."""
    n, width = dy.shape[0], sum(outputs)
    room = -(-rank * len(outputs) // ROOM) * ROOM
    copied = n * (width + room) * dy.itemsize if dy.shape[1] == width or dy.stride(1) != 1 else 0
    return copied + max(parts_bytes(n, outputs, rank) - results, 0)


def gradients(
    dy: Tensor,
    u_NR: Tensor,
    b_OR: Tensor,
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    scale: float,
    *,
    joined: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dy with du past it where `joined`, du, dB, counters of `summed`); dy without room for du is copied then."""
    n, slots, width = u_NR.shape[0], len(outputs), sum(outputs)
    if dy.stride(1) != 1:
        dy = dy.contiguous()
    copy = joined and dy.shape[1] == width
    wide = dy.new_empty(n, width + -(-rank * slots // ROOM) * ROOM) if copy else dy
    chunk, rows = _cut(outputs, n)
    parts = triton.cdiv(n, rows)
    du_parts = dy.new_empty((width // chunk, n, rank), dtype=torch.float32)
    db_parts = dy.new_empty((parts, width, rank), dtype=torch.float32)
    programs.up_backward[width // chunk, parts](
        dy,
        u_NR,
        b_OR,
        du_parts,
        db_parts,
        wide,
        n,
        dy.stride(0),
        b_OR.stride(0),
        wide.stride(0),
        OUT=width,
        **_named_ends(outputs),
        R=rank,
        S=slots,
        M=32 if chunk == 256 else 64,
        C=chunk,
        ROWS=rows,
        COPY=copy,
        num_warps=4,
        num_stages=3,
    )
    du_NR, db, counters, _ = summed(
        du_parts, db_parts, wide[:, width:] if joined else None, inputs, outputs, rank, scale, dtype=dy.dtype
    )
    return wide, du_NR, db, counters


def summed(
    du_parts: Tensor,
    db_parts: Tensor,
    room: Tensor | None,
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    scale: float,
    da_parts: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """du [N, R], also into `room` if given; dB [outputs, rank] fp32; counters for `down_gradient`; da's sum."""
    chunks, n, _ = du_parts.shape
    parts, width, _ = db_parts.shape
    slots, tile, block = len(outputs), 64, 1024
    device = du_parts.device
    du_NR = torch.empty((n, slots * rank), dtype=dtype, device=device)
    if room is None:
        room = du_NR  # written twice
    db = torch.empty((width, rank), dtype=torch.float32, device=device)
    counters = torch.empty(triton.next_power_of_2(triton.cdiv(inputs, COLUMNS)), dtype=torch.int32, device=device)
    da = db if da_parts is None else da_parts.new_empty(da_parts.shape[1:])
    others = 0 if da_parts is None else da.numel()
    programs.up_backward_sums[triton.cdiv(n, tile) * slots + triton.cdiv(width, tile) + triton.cdiv(others, block),](
        du_parts,
        db_parts,
        du_NR,
        room,
        db,
        db if da_parts is None else da_parts,
        da,
        counters,
        scale,
        n,
        room.stride(0),
        parts,
        OUT=width,
        **_named_ends(outputs),
        R=rank,
        S=slots,
        C=width // chunks,
        M=tile,
        DA=others,
        COUNTERS=counters.numel(),
        BLOCK=block,
        num_warps=4,
    )
    return du_NR, db, counters, da


def down_gradient(x_NI: Tensor, du_NR: Tensor, counters: Tensor) -> Tensor:
    """dA = duᵀ x, [R, I] fp32; the counters come from `summed` of the same call."""
    n, inputs = x_NI.shape
    ranks = du_NR.shape[1]
    chunks, rows = triton.cdiv(inputs, COLUMNS), ROWS
    while rows > 128 and chunks * triton.cdiv(n, rows) < PROGRAMS:
        rows //= 2
    parts = triton.cdiv(n, rows)
    da = torch.empty((ranks, inputs), dtype=torch.float32, device=x_NI.device)
    programs.down_gradient[chunks, parts](
        x_NI,
        du_NR,
        da.new_empty((parts, ranks, inputs)),
        da,
        counters,
        n,
        x_NI.stride(0),
        IN=inputs,
        RANKS=ranks,
        WIDE=triton.next_power_of_2(ranks),
        M=64,
        C=COLUMNS,
        ROWS=rows,
        num_warps=4,
        num_stages=3,
    )
    return da


def dropped_gradient(x_NI: Tensor, du_NR: Tensor, seed: Tensor, slots: int, p: float, salts: Sequence[int]) -> Tensor:
    """dA = duᵀ dropout(x), [R, I] fp32."""
    (n, inputs), ranks = x_NI.shape, du_NR.shape[1]
    parts, columns = triton.cdiv(n, 512), 128
    da_parts = torch.empty((parts, ranks, inputs), dtype=torch.float32, device=x_NI.device)
    programs.down_backward[triton.cdiv(inputs, columns) * slots, parts](
        x_NI,
        du_NR,
        da_parts,
        *_dropout(p, seed, salts),
        n,
        x_NI.stride(0),
        IN=inputs,
        R=ranks // slots,
        S=slots,
        M=64,
        C=columns,
        ROWS=512,
        DROP=True,
        num_warps=4,
        num_stages=3,
    )
    return da_parts.sum(0)


def add_dropped(
    dx_NI: Tensor, du_NR: Tensor, a_RI: Tensor, seed: Tensor, slots: int, p: float, salts: Sequence[int]
) -> None:
    """dx += Σ over projections of mask · (du A) / (1 − p), in place."""
    (n, inputs), columns = dx_NI.shape, 128
    programs.dropped_dx[triton.cdiv(n, 64), triton.cdiv(inputs, columns)](
        dx_NI,
        du_NR,
        a_RI,
        *_dropout(p, seed, salts),
        n,
        a_RI.stride(0),
        IN=inputs,
        R=du_NR.shape[1] // slots,
        S=slots,
        M=64,
        C=columns,
        num_warps=4,
    )


@torch.library.custom_op("surogate_triton::adapted_linears_backward", mutates_args=())
def _backward(
    dy: Tensor,
    x: Tensor,
    u_NR: Tensor,
    panel_QP: Tensor,
    seed: Tensor,
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    scale: float,
    p: float,
    salts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    # dy may be [N, width + ranks or more]: du is then written past the gradients; nobody else reads it.
    slots, width, ranks = len(outputs), sum(outputs), rank * len(outputs)
    x_NI = x[:, :inputs] if x.stride(1) == 1 else x[:, :inputs].contiguous()
    dy, du_NR, db, counters = gradients(dy, u_NR, panel_QP[:, inputs:], inputs, outputs, rank, scale)
    if p == 0:
        da = down_gradient(x_NI, du_NR, counters)
        return torch.mm(dy[:, : width + ranks], panel_QP[: width + ranks, :inputs]), da, db
    da = dropped_gradient(x_NI, du_NR, seed, slots, p, salts)
    dx = torch.mm(dy[:, :width], panel_QP[:width, :inputs])
    add_dropped(dx, du_NR, panel_QP[width:, :inputs], seed, slots, p, salts)
    return dx, da, db


@_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    u_NR: Tensor,
    panel_QP: Tensor,
    seed: Tensor,
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    scale: float,
    p: float,
    salts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    ranks, width = rank * len(outputs), sum(outputs)
    return (
        x.new_empty(x.shape[0], inputs),
        x.new_empty((ranks, inputs), dtype=torch.float32),
        x.new_empty((width, rank), dtype=torch.float32),
    )


@workspace(torch.ops.surogate_triton.adapted_linears_backward)
def _backward_bytes(
    dy: Tensor,
    x: Tensor,
    u_NR: Tensor,
    panel_QP: Tensor,
    seed: Tensor,
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    scale: float,
    p: float,
    salts: Sequence[int],
) -> int:
    n = dy.shape[0]
    dropped = -(-n // 512) * rank * len(outputs) * inputs * 4 if p else 0
    copied = 0 if x.stride(1) == 1 else n * inputs * x.itemsize
    return copied + max(gradients_bytes(dy, outputs, rank, n * inputs * dy.itemsize), dropped)


class _AdaptedLinears(Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, panel_QP: Tensor, seed: Tensor, shape: PanelShape, p: float, *adapters: Tensor
    ) -> tuple[Tensor, ...]:
        n, outputs, salts = x_NI.shape[0], list(shape.outputs), list(shape.salts)
        # One sum in fp32, rounded once: bf16 would swallow what a young adapter adds to a y already rounded.
        room = x_NI.new_empty(n, -(-shape.ranks // ROOM) * ROOM)
        x_NI = torch.cat((x_NI, room), dim=1)
        y, u_NR = _forward(x_NI, panel_QP, seed, shape.inputs, outputs, shape.rank, p, salts)
        ctx.save_for_backward(x_NI, u_NR, panel_QP, seed)
        ctx.shape, ctx.p = shape, p
        if len(outputs) == 1:
            return (y,)
        granule = _chunk(outputs, 128)
        parts = y.view(n, -1, granule).split([o // granule for o in outputs], dim=1)
        return tuple(part.view(n, o) for part, o in zip(parts, outputs, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, u_NR, panel_QP, seed = ctx.saved_tensors
        shape: PanelShape = ctx.shape
        n, outputs, salts = x_NI.shape[0], list(shape.outputs), list(shape.salts)
        dy = dys[0]
        if len(dys) > 1:
            # Joined as [N, heads, features]: only so does Inductor let the kernels that make the parts write in place.
            granule = _chunk(outputs, 128)
            room = dy.new_empty(n, -(-shape.ranks // granule), granule)
            dy = torch.cat((*(dy.reshape(n, -1, granule) for dy in dys), room), dim=1).view(n, -1)
        dx, da, db = _backward(
            dy, x_NI, u_NR, panel_QP, seed, shape.inputs, outputs, shape.rank, shape.scale, ctx.p, salts
        )
        adapters = [g for pair in zip(da.split(shape.rank), db.split(outputs), strict=True) for g in pair]
        return dx, None, None, None, None, *adapters


def adapted_linears(
    x: Tensor, panel: Tensor, seed: Tensor | None, shape: PanelShape, *adapters: Tensor
) -> Sequence[Tensor]:
    """`ops.adapted_linears`; gradients of the adapters are fp32."""
    p = 0.0 if seed is None else shape.dropout
    if seed is None:
        seed = torch.empty((), dtype=torch.int32, device=x.device)  # not read
    found: tuple[Tensor, ...] = _AdaptedLinears.apply(x, panel, seed, shape, p, *adapters)
    return found


def kernel() -> Kernel:
    """The kernel."""
    return Kernel(
        op="adapted_linears",
        name="triton",
        function=adapted_linears,
        supports=lambda device, dtype: device.type == "cuda" and dtype == torch.bfloat16,
        priority=10,
    )
