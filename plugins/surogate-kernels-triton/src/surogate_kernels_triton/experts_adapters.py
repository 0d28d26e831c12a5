"""The op `grouped_linears` for any product of the weights: that of a recipe, or the plain one of trained weights.

u = x Aᵀ is computed from the rows of tokens, which the product reads sorted; u Bᵀ is added to what the product gives.
Suffixes as in `surogate_core.kernels.experts`; S adapted projections of one input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from surogate_core.plugin import bundles, compute
from surogate_kernels_triton import experts_launches as launches
from surogate_kernels_triton.experts_routing import sum_rows


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::experts_rows", mutates_args=())
def _rows(
    x: Tensor,
    order_R: Tensor | None,
    ends_E: Tensor,
    a: Sequence[Tensor],
    choices: int,
    seed: Tensor | None,
    p: float,
    salts: Sequence[int],
) -> list[Tensor]:
    """u [R, S·L] and, with an order, the rows of x [R, I]."""
    (x,) = launches.rows_apart([x])
    rows = x.shape[0] if order_R is None else len(order_R)
    u_RL = x.new_empty(rows, len(a) * a[0].shape[1])
    table_T4 = launches.tile_table(ends_E, rows, launches.ROWS)
    dropout = launches.Dropout.made(seed, p, salts)
    launches.down(x, order_R, table_T4, a, u_RL, choices=choices, dropout=dropout)
    return [u_RL] if order_R is None else [u_RL, x.index_select(0, order_R // choices)]


@_rows.register_fake
def _(x: Tensor, order_R: Tensor | None, ends_E: Tensor, a: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    rows = x.shape[0] if order_R is None else order_R.shape[0]
    u_RL = x.new_empty(rows, len(a) * a[0].shape[1])
    return [u_RL] if order_R is None else [u_RL, x.new_empty(rows, x.shape[1])]


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::experts_rows_backward", mutates_args=())
def _rows_backward(
    dx_RI: Tensor,
    du_RL: Tensor,
    x: Tensor,
    order_R: Tensor | None,
    slot_NK: Tensor | None,
    ends_E: Tensor,
    a: Sequence[Tensor],
    choices: int,
    seed: Tensor | None,
    p: float,
    salts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """dx in the shape of x, of the rows and of u; dA's [S, E, L, I] fp32."""
    (dx_RI,), (du_RL,), (x,) = (launches.rows_apart([t]) for t in (dx_RI, du_RL, x))
    rows, rank = dx_RI.shape[0], a[0].shape[1]
    da = x.new_empty(len(a), *a[0].shape, dtype=torch.float32)
    dropout = launches.Dropout.made(seed, p, salts)
    launches.factors(x, du_RL, order_R, ends_E, da, choices=choices, rank=rank, dropout=dropout)
    total_RI = dx_RI.new_empty(*dx_RI.shape)
    table_T4 = launches.tile_table(ends_E, rows, launches.ROWS)
    launches.up(dx_RI, du_RL, a, table_T4, 1.0, a=True, out_RO=total_RI, dropout=dropout)
    return total_RI if slot_NK is None else sum_rows(total_RI, slot_NK, None, False), da


@_rows_backward.register_fake
def _(
    dx_RI: Tensor, du_RL: Tensor, x: Tensor, order_R: Any, slot_NK: Any, ends_E: Any, a: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape), x.new_empty(len(a), *a[0].shape, dtype=torch.float32)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::experts_up", mutates_args=())
def _up(y_RO: Tensor, u_RL: Tensor, ends_E: Tensor, b_EOL: Tensor, scale: float) -> Tensor:
    """y + scale · u Bᵀ."""
    (y_RO,), (u_RL,) = launches.rows_apart([y_RO]), launches.rows_apart([u_RL])
    out_RO = y_RO.new_empty(*y_RO.shape)
    table_T4 = launches.tile_table(ends_E, len(y_RO), launches.ROWS)
    launches.up(y_RO, u_RL, [b_EOL], table_T4, scale, out_RO=out_RO)
    return out_RO


@_up.register_fake
def _(y_RO: Tensor, u_RL: Tensor, ends_E: Tensor, b_EOL: Tensor, scale: float) -> Tensor:
    return y_RO.new_empty(*y_RO.shape)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::experts_up_backward", mutates_args=())
def _up_backward(dy_RO: Tensor, u_RL: Tensor, ends_E: Tensor, b_EOL: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(du [R, L], dB [E, O, L] fp32)."""
    (dy_RO,), (u_RL,) = launches.rows_apart([dy_RO]), launches.rows_apart([u_RL])
    du_RL, db = u_RL.new_empty(*u_RL.shape), torch.empty_like(b_EOL, dtype=torch.float32)
    table_T4 = launches.tile_table(ends_E, len(dy_RO), launches.ROWS)
    launches.down(dy_RO, None, table_T4, [b_EOL], du_RL, choices=1, scale=scale, transposed=True)
    launches.factors(dy_RO, u_RL, None, ends_E, db, choices=1, rank=u_RL.shape[1], scale=scale)
    return du_RL, db


@_up_backward.register_fake
def _(dy_RO: Tensor, u_RL: Tensor, ends_E: Tensor, b_EOL: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return u_RL.new_empty(*u_RL.shape), torch.empty_like(b_EOL, dtype=torch.float32)


@register_flop_formula(torch.ops.surogate_triton.experts_rows)
def _rows_flops(x: Any, order: Any, ends: Any, a: Any, *rest: Any, **named: Any) -> int:
    return 2 * (x[0] if order is None else order[0]) * sum(shape[1] * shape[2] for shape in a)


@register_flop_formula(torch.ops.surogate_triton.experts_rows_backward)
def _rows_backward_flops(
    dx: Any, du: Any, x: Any, order: Any, slot: Any, ends: Any, a: Any, *rest: Any, **named: Any
) -> int:
    return 4 * dx[0] * sum(shape[1] * shape[2] for shape in a)


@register_flop_formula(torch.ops.surogate_triton.experts_up)
def _up_flops(y: Any, u: Any, *rest: Any, **named: Any) -> int:
    return 2 * y[0] * y[1] * u[1]


@register_flop_formula(torch.ops.surogate_triton.experts_up_backward)
def _up_backward_flops(dy: Any, u: Any, *rest: Any, **named: Any) -> int:
    return 4 * dy[0] * dy[1] * u[1]


@compute.workspace(torch.ops.surogate_triton.experts_rows_backward)
def _rows_backward_bytes(
    dx_RI: Tensor, du_RL: Tensor, x: Tensor, order_R: Tensor | None, slot_NK: Tensor | None, *rest: Any
) -> int:
    """The gradients of the rows, where those of a token are added."""
    return 0 if slot_NK is None else dx_RI.numel() * dx_RI.itemsize


class _Rows(Function):
    """(u, the rows of x): the rows of its tokens with an order, x itself without."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        order_R: Tensor | None,
        slot_NK: Tensor | None,
        ends_E: Tensor,
        masks: tuple[Tensor | None, float, tuple[int, ...]],
        *adapters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        a = [launches.padded(t.to(x.dtype), 1).contiguous() for t in adapters]
        ctx.choices = 1 if slot_NK is None else slot_NK.shape[1]
        u_RL, *gathered = _rows(x, order_R, ends_E, a, ctx.choices, *masks)
        seed = [] if masks[0] is None else [masks[0]]
        ctx.save_for_backward(*seed, x, ends_E, *a, *[t for t in (order_R, slot_NK) if t is not None])
        ctx.masks = len(seed), *masks[1:]
        ctx.count, ctx.rank = len(a), adapters[0].shape[1]
        return u_RL, gathered[0] if gathered else x.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du_RL: Tensor, dx_RI: Tensor) -> tuple[Tensor | None, ...]:
        x, ends_E, *saved = ctx.saved_tensors[ctx.masks[0] :]
        seed = ctx.saved_tensors[0] if ctx.masks[0] else None
        a, where = saved[: ctx.count], saved[ctx.count :] or [None, None]
        dx, da = _rows_backward(dx_RI, du_RL, x, *where, ends_E, a, ctx.choices, seed, *ctx.masks[1:])
        return dx, None, None, None, None, *(da[number, :, : ctx.rank] for number in range(ctx.count))


class _Up(Function):
    @staticmethod
    def forward(ctx: Any, y_RO: Tensor, u_RL: Tensor, ends_E: Tensor, b_EOL: Tensor, scale: float) -> Tensor:
        ctx.rank, ctx.scale = b_EOL.shape[2], scale
        b_EOL = launches.padded(b_EOL.to(y_RO.dtype), 2).contiguous()
        ctx.save_for_backward(u_RL, ends_E, b_EOL)
        return _up(y_RO, u_RL, ends_E, b_EOL, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        du_RL, db = _up_backward(dy_RO, *ctx.saved_tensors, ctx.scale)
        return dy_RO, du_RL, None, db[..., : ctx.rank], None


def grouped_linears(
    x: Tensor,
    order_R: Tensor | None,
    slot_NK: Tensor | None,
    ends_E: Tensor,
    seed: Tensor | None,
    adapters: Sequence[compute.ExpertAdapter | None],
    product: compute.GroupedProduct | None,
    *tensors: Tensor,
    parts: bool = False,
    others: Sequence[Tensor] = (),
) -> Sequence[Tensor]:
    """`experts.grouped_linears` where `takes` accepts the arguments; gradients of the adapters are fp32."""
    rest = iter(tensors)
    weights, pairs = [], []
    for number, adapter in enumerate(adapters):
        weights.append(torch.cat((next(rest), others[number])) if others else next(rest))
        pairs.append(None if adapter is None else (next(rest), next(rest)))
    u_RL, x_RI = _Rows.apply(
        x, order_R, slot_NK, ends_E, launches.masks(seed, adapters), *[pair[0] for pair in pairs if pair is not None]
    )
    if product is None:
        found = [compute.grouped_product(x_RI, weights_EOI, ends_E) for weights_EOI in weights]
    else:
        found = list(product(x_RI, weights, ends_E))
    of_pair = iter(u_RL.chunk(sum(pair is not None for pair in pairs), dim=1))
    for number, (adapter, pair) in enumerate(zip(adapters, pairs, strict=True)):
        if adapter is not None and pair is not None:
            found[number] = _Up.apply(found[number], next(of_pair), ends_E, pair[1], adapter.scale)
    return found


def takes(
    x: Tensor,
    order_R: Tensor | None,
    slot_NK: Tensor | None,
    ends_E: Tensor,
    seed: Tensor | None,
    adapters: Sequence[compute.ExpertAdapter | None],
    product: compute.GroupedProduct | None,
    *tensors: Tensor,
    parts: bool = False,
    others: Sequence[Tensor] = (),
) -> bool:
    """One or two adapters of equal rank and dropout."""
    given = [adapter for adapter in adapters if adapter is not None]
    if not 1 <= len(given) <= 2 or len({(adapter.rank, adapter.dropout) for adapter in given}) > 1:
        return False
    return given[0].rank <= launches.MOST_RANK and len(ends_E) < launches.MOST_EXPERTS


def kernel() -> bundles.Kernel:
    """The kernel, below those for frozen weights in priority."""
    return bundles.Kernel(
        op="grouped_linears",
        name="triton-adapters",
        function=grouped_linears,
        supports=lambda device, dtype: device.type == "cuda" and dtype in (torch.float16, torch.bfloat16),
        takes=takes,
        knows=frozenset({"parts", "others"}),
        priority=3,
    )
