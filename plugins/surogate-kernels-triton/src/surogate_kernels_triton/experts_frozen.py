"""The op `grouped_linears` for frozen weights with adapters, in two forms.

`triton-wide` multiplies by torch's grouped products. The rows of tokens are gathered once, by the program that computes
u = x Aᵀ; u Bᵀ is added to the finished product. `triton-fused` gathers in the load of its own product and has adapters,
and in the backward both projections, in one sum. Gradients of adapters are fp32 sums over an expert's rows in their
order. Suffixes as in `surogate_core.kernels.experts`; S projections of one input, T tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from surogate_core.bundles import Kernel
from surogate_core.kernels import grouped
from surogate_core.kernels.experts import ExpertAdapter, GroupedProduct
from surogate_core.kernels.registry import workspace
from surogate_kernels_triton import experts_launches as launches
from surogate_kernels_triton.experts_routing import sum_rows

FORMS = (("wide", False, 10), ("fused", True, 5))
"""(name, whether it multiplies by the pack's own products, priority)."""
MULTIPLE = 16
"""Sides of weights are multiples of this."""


def project(
    x: Tensor,
    order_R: Tensor | None,
    ends_E: Tensor,
    weights: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: float,
    choices: int,
    fused: bool,
    dropout: launches.Dropout | None,
) -> list[Tensor]:
    """y of each projection and, with adapters, u [R, S·L]."""
    (x,) = launches.rows_apart([x])
    rows = x.shape[0] if order_R is None else len(order_R)
    extra: list[Tensor] = []
    gathered_RI = None if order_R is None or fused else x.new_empty(rows, x.shape[1])
    table_T4 = launches.tile_table(ends_E, rows, launches.ROWS) if a else None
    if table_T4 is not None:
        u_RL = x.new_empty(rows, len(a) * a[0].shape[1])
        launches.down(x, order_R, table_T4, a, u_RL, gathered_RI, choices=choices, dropout=dropout)
        extra.append(u_RL)
    elif gathered_RI is not None:
        assert order_R is not None
        torch.index_select(x, 0, order_R // choices, out=gathered_RI)
    found = []
    for number, weights_EOI in enumerate(weights):
        rank = a[0].shape[1] if a else 0
        part_RL = extra[0][:, number * rank : (number + 1) * rank] if a else None
        if fused:
            more = b[number : number + 1]
            named = {"choices": choices, "scale": scale, "backward": False}
            y_RO = launches.grouped_sum([x], [weights_EOI], part_RL, more, order_R, ends_E, rows, **named)  # type: ignore[arg-type]
        else:
            y_RO = grouped.torch_product(x if gathered_RI is None else gathered_RI, weights_EOI, ends_E)
            if part_RL is not None and table_T4 is not None:
                launches.up(y_RO, None, part_RL, b[number : number + 1], table_T4, scale, a=False)
        found.append(y_RO)
    return found + extra


@torch.library.custom_op("surogate_triton::experts", mutates_args=())
def _forward(
    x: Tensor,
    order_R: Tensor | None,
    ends_E: Tensor,
    weights: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: float,
    choices: int,
    fused: bool,
    seed: Tensor | None,
    p: float,
    salts: Sequence[int],
) -> list[Tensor]:
    dropout = launches.Dropout.made(seed, p, salts)
    return project(x, order_R, ends_E, weights, a, b, scale, choices, fused, dropout)


@_forward.register_fake
def _(
    x: Tensor,
    order_R: Tensor | None,
    ends_E: Tensor,
    weights: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: float,
    choices: int,
    fused: bool,
    seed: Tensor | None,
    p: float,
    salts: Sequence[int],
) -> list[Tensor]:
    rows = x.shape[0] if order_R is None else order_R.shape[0]
    found = [x.new_empty(rows, w.shape[1]) for w in weights]
    return [*found, x.new_empty(rows, len(a) * a[0].shape[1])] if a else found


@torch.library.custom_op("surogate_triton::experts_backward", mutates_args=())
def _backward(
    dys: Sequence[Tensor],
    x: Tensor,
    order_R: Tensor | None,
    slot_NK: Tensor | None,
    ends_E: Tensor,
    weights: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    u_RL: Tensor | None,
    scale: float,
    choices: int,
    fused: bool,
    seed: Tensor | None,
    p: float,
    salts: Sequence[int],
) -> list[Tensor]:
    """dx in the shape of x and, with adapters, dA's [S, E, L, I] and each dB [E, O, L], both fp32."""
    dys, (x,) = launches.rows_apart(dys), launches.rows_apart([x])
    rows = dys[0].shape[0]
    found: list[Tensor] = []
    du_RL, table_T4, dropout = None, None, launches.Dropout.made(seed, p, salts)
    if u_RL is not None:
        table_T4, rank = launches.tile_table(ends_E, rows, launches.ROWS), a[0].shape[1]
        du_RL = torch.empty_like(u_RL)
        found.append(x.new_empty(len(a), *a[0].shape, dtype=torch.float32))
        for number, (dy_RO, b_EOL) in enumerate(zip(dys, b, strict=True)):
            part = slice(number * rank, (number + 1) * rank)
            named = {"choices": choices, "scale": scale}
            launches.down(dy_RO, None, table_T4, [b_EOL], du_RL[:, part], None, transposed=True, **named)  # type: ignore[arg-type]
            found.append(torch.empty_like(b_EOL, dtype=torch.float32))
            launches.factors(dy_RO, u_RL[:, part], None, ends_E, found[-1], rank=rank, **named)  # type: ignore[arg-type]
        launches.factors(x, du_RL, order_R, ends_E, found[0], choices=choices, rank=rank, dropout=dropout)
    if fused:
        rest: Any = {"choices": choices, "scale": 1.0, "backward": True, "dropout": dropout}
        dx_RI = launches.grouped_sum(dys, weights, du_RL, a, None, ends_E, rows, **rest)
    else:
        parts = [grouped.torch_product(dy_RO, w.transpose(1, 2), ends_E) for dy_RO, w in zip(dys, weights, strict=True)]
        dx_RI, other = parts[0], parts[1] if len(parts) > 1 else None
        if du_RL is not None and table_T4 is not None:
            launches.up(dx_RI, other, du_RL, a, table_T4, 1.0, a=True, dropout=dropout)
        elif other is not None:
            dx_RI += other
    return [dx_RI if slot_NK is None else sum_rows(dx_RI, slot_NK, None), *found]


@_backward.register_fake
def _(
    dys: Sequence[Tensor],
    x: Tensor,
    order_R: Tensor | None,
    slot_NK: Tensor | None,
    ends_E: Tensor,
    weights: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    u_RL: Tensor | None,
    scale: float,
    choices: int,
    fused: bool,
    seed: Tensor | None,
    p: float,
    salts: Sequence[int],
) -> list[Tensor]:
    found = [x.new_empty(*x.shape)]
    if u_RL is not None:
        found.append(x.new_empty(len(a), *a[0].shape, dtype=torch.float32))
        found += [b_EOL.new_empty(*b_EOL.shape, dtype=torch.float32) for b_EOL in b]
    return found


@register_flop_formula(torch.ops.surogate_triton.experts)
def _flops(x: Any, order: Any, ends: Any, weights: Any, a: Any, b: Any, *rest: Any, **named: Any) -> int:
    rows = x[0] if order is None else order[0]
    return 2 * rows * sum(shape[1] * shape[2] for shape in (*weights, *a, *b))


@register_flop_formula(torch.ops.surogate_triton.experts_backward)
def _backward_flops(
    dys: Any, x: Any, order: Any, slot: Any, ends: Any, weights: Any, a: Any, b: Any, *rest: Any, **named: Any
) -> int:
    sizes = [shape[1] * shape[2] for shape in weights] + 2 * [shape[1] * shape[2] for shape in (*a, *b)]
    return 2 * dys[0][0] * sum(sizes)


@workspace(torch.ops.surogate_triton.experts)
def _bytes(
    x: Tensor,
    order_R: Tensor | None,
    ends_E: Tensor,
    weights: Any,
    a: Any,
    b: Any,
    scale: float,
    choices: int,
    fused: bool,
    *rest: Any,
) -> int:
    """The gathered rows."""
    return 0 if fused or order_R is None else len(order_R) * x.shape[1] * x.itemsize


@workspace(torch.ops.surogate_triton.experts_backward)
def _backward_bytes(
    dys: Sequence[Tensor],
    x: Tensor,
    order_R: Tensor | None,
    slot_NK: Tensor | None,
    ends_E: Tensor,
    weights: Sequence[Tensor],
    a: Any,
    b: Any,
    u_RL: Tensor | None,
    scale: float,
    choices: int,
    fused: bool,
    *rest: Any,
) -> int:
    """du, and of dx the rows that are added: before they are summed, those of each projection."""
    rows = dys[0].shape[0] * x.shape[1] * x.itemsize
    wide = (1 if slot_NK is not None else 0) + (0 if fused else len(weights) - 1)
    return wide * rows + (0 if u_RL is None else u_RL.numel() * u_RL.itemsize)


class _Experts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        order_R: Tensor | None,
        slot_NK: Tensor | None,
        ends_E: Tensor,
        weights: Sequence[Tensor],
        scale: float,
        fused: bool,
        masks: tuple[Tensor | None, float, tuple[int, ...]],
        *adapters: Tensor,
    ) -> tuple[Tensor, ...]:
        a = [launches.padded(t.to(x.dtype), 1).contiguous() for t in adapters[::2]]
        b = [launches.padded(t.to(x.dtype), 2).contiguous() for t in adapters[1::2]]
        choices = 1 if slot_NK is None else slot_NK.shape[1]
        found = _forward(x, order_R, ends_E, weights, a, b, scale, choices, fused, *masks)
        u = found[len(weights) :]
        where = [t for t in (order_R, slot_NK, masks[0]) if t is not None]
        ctx.save_for_backward(x, ends_E, *where, *weights, *a, *b, *u)
        ctx.masks = masks[0] is not None, *masks[1:]
        ctx.sizes = order_R is not None, len(weights), len(a)
        ctx.rest = scale, choices, fused
        ctx.rank = adapters[0].shape[1] if adapters else 0
        return tuple(found[: len(weights)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, ends_E, *saved = ctx.saved_tensors
        gathers, count, adapted = ctx.sizes
        order_R, slot_NK = (saved.pop(0), saved.pop(0)) if gathers else (None, None)
        seed = saved.pop(0) if ctx.masks[0] else None
        weights, a, b = saved[:count], saved[count : count + adapted], saved[count + adapted : count + 2 * adapted]
        u_RL = saved[-1] if adapted else None
        dx, *more = _backward(
            list(dys), x, order_R, slot_NK, ends_E, weights, a, b, u_RL, *ctx.rest, seed, *ctx.masks[1:]
        )
        gradients: list[Tensor] = []
        for number in range(adapted):
            gradients += [more[0][number, :, : ctx.rank], more[1 + number][..., : ctx.rank]]
        return dx, None, None, None, None, None, None, None, *gradients


def grouped_linears(
    fused: bool,
    x: Tensor,
    order_R: Tensor | None,
    slot_NK: Tensor | None,
    ends_E: Tensor,
    seed: Tensor | None,
    adapters: Sequence[ExpertAdapter | None],
    product: GroupedProduct | None,
    *tensors: Tensor,
) -> Sequence[Tensor]:
    """`experts.grouped_linears` where `takes` accepts the arguments; gradients of the adapters are fp32."""
    first = adapters[0]
    weights, scale, pairs = tensors, 0.0, list[Tensor]()
    if first is not None:
        weights, scale = tensors[::3], first.scale
        pairs = [t for number, t in enumerate(tensors) if number % 3]
    masks = launches.masks(seed, adapters)
    found: tuple[Tensor, ...] = _Experts.apply(x, order_R, slot_NK, ends_E, weights, scale, fused, masks, *pairs)
    return found


def takes(
    fused: bool,
    x: Tensor,
    order_R: Tensor | None,
    slot_NK: Tensor | None,
    ends_E: Tensor,
    seed: Tensor | None,
    adapters: Sequence[ExpertAdapter | None],
    product: GroupedProduct | None,
    *tensors: Tensor,
) -> bool:
    """Frozen weights in the dtype of x, multiplied plainly, with equal adapters or none."""
    first = adapters[0]
    if product is not None or len(adapters) > 2 or len(ends_E) >= launches.MOST_EXPERTS:
        return False
    if any((each is None) != (first is None) for each in adapters):
        return False
    kinds = {(each.rank, each.scale, each.dropout) for each in adapters if each is not None}
    if len(kinds) > 1 or any(rank > launches.MOST_RANK for rank, *_ in kinds):
        return False
    weights = tensors if first is None else tensors[::3]
    if len({w.shape for w in weights}) > 1 or any(side % MULTIPLE for side in weights[0].shape[1:]):
        return False
    trained = torch.is_grad_enabled() and any(w.requires_grad for w in weights)
    if trained or any(w.dtype != x.dtype or not w.is_contiguous() for w in weights):
        return False
    return fused or grouped.usable(weights[0], ends_E)


def supports(fused: bool, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a form runs there."""
    if not fused:
        return grouped.supports(device, dtype)
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def kernels() -> tuple[Kernel, ...]:
    """The kernels; the first is preferred where both can run."""
    return tuple(
        Kernel(
            op="grouped_linears",
            name=f"triton-{name}",
            function=partial(grouped_linears, fused),
            supports=partial(supports, fused),
            takes=partial(takes, fused),
            priority=priority,
        )
        for name, fused, priority in FORMS
    )
