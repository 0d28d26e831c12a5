"""The op `adapted_linears` on panels: cuBLAS for the wide products, Triton for the skinny ones.

The adapters add a few columns to the inner dimension of a product: u follows x in its rows and scale·B follows W, so
that y needs no second pass; likewise du follows dy, and A is below W. Both ops have two forms. A graph is traced with
the one that changes no argument. Inductor gets the other, whose name ends in `_` and which declares that it writes u or
du into an argument. The columns for them come from a `cat` that ends in an empty tensor. Shape suffixes as in
`surogate_core.kernels.panels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from surogate_native.adapters import (
    FEW,
    ROOM,
    add_dropped,
    chunk_of,
    columns_of,
    down,
    down_few,
    down_gradient,
    dropped_gradient,
    gradients,
    gradients_bytes,
)
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from surogate_core.plugin import bundles, compute


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::adapted_linears_", mutates_args=("x",))
def _forward_in_place(
    x: Tensor,
    panel_QP: Tensor,
    seed: Tensor,
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    p: float,
    salts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """(y, u); x is [N, I + ranks or more], and u is written behind its first I columns."""
    n, width, ranks = x.shape[0], sum(outputs), rank * len(outputs)
    if x.stride(1) != 1:
        x = x.contiguous()
    u_NR = x.new_empty(n, ranks)
    down(x, panel_QP[width:, :inputs], u_NR, x[:, inputs:], seed, len(outputs), p, salts)
    return torch.mm(x[:, : inputs + ranks], panel_QP[:width, : inputs + ranks].t()), u_NR


@compute.compiled_ahead
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
    """(y, u); x is [N, I + ranks or more], of which columns behind the first I are not read."""
    return _forward_in_place(x.clone(), panel_QP, seed, inputs, outputs, rank, p, salts)


def _forward_fake(
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


_forward.register_fake(_forward_fake)
_forward_in_place.register_fake(_forward_fake)
compute.in_place[torch.ops.surogate_triton.adapted_linears.default] = compute.InPlace(
    op=torch.ops.surogate_triton.adapted_linears_.default, takes=lambda *arguments: True
)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::adapted_linears_of_few", mutates_args=())
def _forward_of_few(x: Tensor, panel_QP: Tensor, inputs: int, outputs: Sequence[int], rank: int) -> Tensor:
    """y of few rows without dropout or backward: the kernel of u copies x, which needs no launch of its own."""
    n, width, ranks = x.shape[0], sum(outputs), rank * len(outputs)
    if x.stride(1) != 1:
        x = x.contiguous()
    wide, u_NR = x.new_empty(n, inputs + _room(ranks)), x.new_empty(n, ranks)
    down_few(x, panel_QP[width:, :inputs], u_NR, wide[:, inputs:], len(outputs), copies=True)
    return torch.mm(wide[:, : inputs + ranks], panel_QP[:width, : inputs + ranks].t())


@_forward_of_few.register_fake
def _(x: Tensor, panel_QP: Tensor, inputs: int, outputs: Sequence[int], rank: int) -> Tensor:
    return x.new_empty(x.shape[0], sum(outputs))


def _room(ranks: int) -> int:
    """Columns behind x, in which u has the first."""
    return -(-ranks // ROOM) * ROOM


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


@register_flop_formula(torch.ops.surogate_triton.adapted_linears_of_few)
def _flops_of_few(
    x_shape: Sequence[int], panel: Any, inputs: int, outputs: Sequence[int], rank: int, **named: Any
) -> int:
    return _flops(x_shape, panel, None, inputs, outputs, rank)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::adapted_linears_backward_", mutates_args=("dy",))
def _backward_in_place(
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
    """(dx, dA, dB); dy is [N, outputs + ranks or more], and du is written behind the gradients."""
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


@compute.compiled_ahead
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
    """(dx, dA, dB); dy is [N, outputs or more], of which columns behind the gradients are not read."""
    # Without columns for du, `gradients` copies dy while it reads it.
    dy = dy[:, : sum(outputs)]
    return _backward_in_place(dy, x, u_NR, panel_QP, seed, inputs, outputs, rank, scale, p, salts)


def _backward_fake(
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


def _has_room(dy: Tensor, x: Tensor, u_NR: Tensor, *rest: Any) -> bool:
    """Whether there are columns for du behind the gradients; a view of the gradients alone is copied."""
    outputs = rest[3]
    return dy.shape[1] > sum(outputs)


_backward.register_fake(_backward_fake)
_backward_in_place.register_fake(_backward_fake)
compute.in_place[torch.ops.surogate_triton.adapted_linears_backward.default] = compute.InPlace(
    op=torch.ops.surogate_triton.adapted_linears_backward_.default, takes=_has_room
)


@compute.workspace(torch.ops.surogate_triton.adapted_linears_backward)
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
        ctx: Any, x_NI: Tensor, panel_QP: Tensor, seed: Tensor, shape: compute.PanelShape, p: float, *adapters: Tensor
    ) -> tuple[Tensor, ...]:
        n, outputs, salts = x_NI.shape[0], list(shape.outputs), list(shape.salts)
        # One sum in fp32, rounded once: bf16 would swallow what a young adapter adds to a y already rounded.
        x_NI = torch.cat((x_NI, x_NI.new_empty(n, _room(shape.ranks))), dim=1)
        # Nobody else has these columns where nothing is traced, so u needs no copy of x.
        run = _forward_in_place if type(x_NI) is Tensor else _forward
        y, u_NR = run(x_NI, panel_QP, seed, shape.inputs, outputs, shape.rank, p, salts)
        ctx.save_for_backward(x_NI, u_NR, panel_QP, seed)
        ctx.shape, ctx.p = shape, p
        return columns_of(y, outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, u_NR, panel_QP, seed = ctx.saved_tensors
        shape: compute.PanelShape = ctx.shape
        n, outputs, salts = x_NI.shape[0], list(shape.outputs), list(shape.salts)
        dy = dys[0]
        if len(dys) > 1:
            # Joined as [N, heads, features], because only then does Inductor let the kernels of the parts write in
            # place.
            granule = chunk_of(outputs, 128)
            room = dy.new_empty(n, -(-shape.ranks // granule), granule)
            dy = torch.cat((*(dy.reshape(n, -1, granule) for dy in dys), room), dim=1).view(n, -1)
        dx, da, db = _backward(
            dy, x_NI, u_NR, panel_QP, seed, shape.inputs, outputs, shape.rank, shape.scale, ctx.p, salts
        )
        adapters = [g for pair in zip(da.split(shape.rank), db.split(outputs), strict=True) for g in pair]
        return dx, None, None, None, None, *adapters


def adapted_linears(
    x: Tensor, panel: Tensor, seed: Tensor | None, shape: compute.PanelShape, *adapters: Tensor
) -> Sequence[Tensor]:
    """`ops.adapted_linears`; gradients of the adapters are fp32."""
    p = 0.0 if seed is None else shape.dropout
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *adapters))
    if p == 0 and x.shape[0] <= FEW and not differentiated:
        outputs = list(shape.outputs)
        y = torch.ops.surogate_triton.adapted_linears_of_few(x, panel, shape.inputs, outputs, shape.rank)
        return columns_of(y, outputs)
    if seed is None:
        seed = torch.empty(0, dtype=torch.int32, device=x.device)  # not read; one element would be a launch
    found: tuple[Tensor, ...] = _AdaptedLinears.apply(x, panel, seed, shape, p, *adapters)
    return found


def kernel() -> bundles.Kernel:
    """The kernel."""
    return bundles.Kernel(
        op="adapted_linears",
        name="triton",
        function=adapted_linears,
        supports=lambda device, dtype: device.type == "cuda" and dtype == torch.bfloat16,
        priority=10,
    )
