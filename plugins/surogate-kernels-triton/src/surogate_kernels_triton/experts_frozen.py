"""The op `grouped_linears` for frozen weights with adapters.

The product is that of the dtype of x, or of a recipe's codes E4M3 (`CodedProduct`), for which the op rounds x and dy.
It gathers rows of tokens in its loads, and adds adapters, and in the backward the second projection, in the
same sum. Gradients of adapters are fp32 sums over an expert's rows in their order. Suffixes as in
`surogate_core.kernels.experts`; S projections of one input, T tiles.
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

NAME, PRIORITY = "triton-fused", 10
MULTIPLE = 16
"""Sides of weights are multiples of this."""


def coded(
    product: compute.CodedProduct | None, weights: Sequence[Tensor], transposed: int
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """(weights, no scales) or, of a product of codes, (codes, inverse scales of their rows)."""
    if product is None:
        return weights, []
    codes, scales = zip(*(both[transposed] for both in product.codes(weights)), strict=True)
    return list(codes), list(scales)


def projections(weights: Sequence[Any], experts: int) -> int:
    """How many there are: the weights of the last experts may follow those of the first in tensors of their own.

    `weights`: tensors or shapes.
    """
    first = weights[0].shape if isinstance(weights[0], Tensor) else weights[0]
    return len(weights) if first[0] == experts else len(weights) // 2


def project(
    x: Tensor,
    order_R: Tensor | None,
    ends_E: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: float,
    choices: int,
    dropout: launches.Dropout | None,
) -> list[Tensor]:
    """y of each projection and, with adapters, u [R, S·L]. With scales, weights are codes."""
    (x,) = launches.rows_apart([x])
    rows = x.shape[0] if order_R is None else len(order_R)
    found, extra, count = [], list[Tensor](), projections(weights, len(ends_E))
    parts: Sequence[Tensor | None] = [None] * count
    if a:
        extra.append(x.new_empty(rows, len(a) * a[0].shape[1]))
        table_T4 = launches.tile_table(ends_E, rows, launches.ROWS)
        launches.down(x, order_R, table_T4, a, extra[0], choices=choices, dropout=dropout)
        parts = extra[0].chunk(len(a), dim=1)
    left = launches.operands([x], scales)
    named: Any = {"choices": choices, "scale": scale, "backward": False, "dtype": x.dtype}
    for number, part_RL in enumerate(parts):
        mine = slice(number, None, count)
        right = launches.paired(weights[mine], scales[mine])
        found.append(launches.multiplied(left, right, part_RL, b[mine], order_R, ends_E, rows, **named))
    return found + extra


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::experts", mutates_args=())
def _forward(
    x: Tensor,
    order_R: Tensor | None,
    ends_E: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: float,
    choices: int,
    seed: Tensor | None,
    p: float,
    salts: Sequence[int],
) -> list[Tensor]:
    dropout = launches.Dropout.made(seed, p, salts)
    return project(x, order_R, ends_E, weights, scales, a, b, scale, choices, dropout)


@_forward.register_fake
def _(
    x: Tensor,
    order_R: Tensor | None,
    ends_E: Tensor,
    weights: Sequence[Tensor],
    scales: Any,
    a: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    rows = x.shape[0] if order_R is None else order_R.shape[0]
    found = [x.new_empty(rows, w.shape[1]) for w in weights[: projections(weights, len(ends_E))]]
    return [*found, x.new_empty(rows, len(a) * a[0].shape[1])] if a else found


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::experts_backward", mutates_args=())
def _backward(
    dys: Sequence[Tensor],
    x: Tensor,
    order_R: Tensor | None,
    slot_NK: Tensor | None,
    ends_E: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    u_RL: Tensor | None,
    scale: float,
    choices: int,
    seed: Tensor | None,
    p: float,
    salts: Sequence[int],
) -> list[Tensor]:
    """dx in the shape of x and, with adapters, dA's [S, E, L, I] and each dB [E, O, L], both fp32.

    With scales, weights are the codes of the transposes.
    """
    dys, (x,) = launches.rows_apart(dys), launches.rows_apart([x])
    rows = dys[0].shape[0]
    found: list[Tensor] = []
    du_RL, dropout = None, launches.Dropout.made(seed, p, salts)
    if u_RL is not None:
        table_T4, rank = launches.tile_table(ends_E, rows, launches.ROWS), a[0].shape[1]
        du_RL = torch.empty_like(u_RL)
        found.append(x.new_empty(len(a), *a[0].shape, dtype=torch.float32))
        for number, (dy_RO, b_EOL) in enumerate(zip(dys, b, strict=True)):
            part = slice(number * rank, (number + 1) * rank)
            named = {"choices": choices, "scale": scale}
            launches.down(dy_RO, None, table_T4, [b_EOL], du_RL[:, part], transposed=True, **named)  # type: ignore[arg-type]
            found.append(torch.empty_like(b_EOL, dtype=torch.float32))
            launches.factors(dy_RO, u_RL[:, part], None, ends_E, found[-1], rank=rank, **named)  # type: ignore[arg-type]
        launches.factors(x, du_RL, order_R, ends_E, found[0], choices=choices, rank=rank, dropout=dropout)
    rest: Any = {"choices": choices, "scale": 1.0, "backward": True, "dtype": x.dtype, "dropout": dropout}
    left, right = launches.operands(dys, scales), launches.paired(weights, scales)
    dx_RI = launches.multiplied(left, right, du_RL, a, None, ends_E, rows, **rest)
    return [dx_RI if slot_NK is None else sum_rows(dx_RI, slot_NK, None, False), *found]


@_backward.register_fake
def _(
    dys: Any,
    x: Tensor,
    order_R: Any,
    slot_NK: Any,
    ends_E: Any,
    weights: Any,
    scales: Any,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    u_RL: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    found = [x.new_empty(*x.shape)]
    if u_RL is not None:
        found.append(x.new_empty(len(a), *a[0].shape, dtype=torch.float32))
        found += [b_EOL.new_empty(*b_EOL.shape, dtype=torch.float32) for b_EOL in b]
    return found


@register_flop_formula(torch.ops.surogate_triton.experts)
def _flops(x: Any, order: Any, ends: Any, weights: Any, scales: Any, a: Any, b: Any, *rest: Any, **named: Any) -> int:
    rows = x[0] if order is None else order[0]
    weights = weights[: projections(weights, ends[0])]
    return 2 * rows * sum(shape[1] * shape[2] for shape in (*weights, *a, *b))


@register_flop_formula(torch.ops.surogate_triton.experts_backward)
def _backward_flops(
    dys: Any,
    x: Any,
    order: Any,
    slot: Any,
    ends: Any,
    weights: Any,
    scales: Any,
    a: Any,
    b: Any,
    *rest: Any,
    **named: Any,
) -> int:
    weights = weights[: projections(weights, ends[0])]
    sizes = [shape[1] * shape[2] for shape in weights] + 2 * [shape[1] * shape[2] for shape in (*a, *b)]
    return 2 * dys[0][0] * sum(sizes)


@compute.workspace(torch.ops.surogate_triton.experts)
def _bytes(x: Tensor, order_R: Tensor | None, ends_E: Tensor, weights: Any, scales: Any, *rest: Any) -> int:
    """The codes of x."""
    return x.numel() if scales else 0


@compute.workspace(torch.ops.surogate_triton.experts_backward)
def _backward_bytes(
    dys: Sequence[Tensor],
    x: Tensor,
    order_R: Tensor | None,
    slot_NK: Tensor | None,
    ends_E: Tensor,
    weights: Any,
    scales: Any,
    a: Any,
    b: Any,
    u_RL: Tensor | None,
    *rest: Any,
) -> int:
    """du, the codes of dy's, and the rows of dx that are added."""
    rows = 0 if slot_NK is None else dys[0].shape[0] * x.shape[1] * x.itemsize
    rows += sum(dy_RO.numel() for dy_RO in dys) if scales else 0
    return rows + (0 if u_RL is None else u_RL.numel() * u_RL.itemsize)


class _Experts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        order_R: Tensor | None,
        slot_NK: Tensor | None,
        ends_E: Tensor,
        weights: Sequence[Tensor],
        product: compute.CodedProduct | None,
        scale: float,
        masks: tuple[Tensor | None, float, tuple[int, ...]],
        *adapters: Tensor,
    ) -> tuple[Tensor, ...]:
        a = [launches.padded(t.to(x.dtype), 1).contiguous() for t in adapters[::2]]
        b = [launches.padded(t.to(x.dtype), 2).contiguous() for t in adapters[1::2]]
        choices = 1 if slot_NK is None else slot_NK.shape[1]
        operands, scales = coded(product, weights, 0)
        found = _forward(x, order_R, ends_E, operands, scales, a, b, scale, choices, *masks)
        count = projections(operands, len(ends_E))
        u = found[count:]
        where = [t for t in (order_R, slot_NK, masks[0]) if t is not None]
        ctx.save_for_backward(x, ends_E, *where, *weights, *a, *b, *u)
        ctx.masks = masks[0] is not None, *masks[1:]
        ctx.sizes = order_R is not None, len(weights), len(a)
        ctx.rest, ctx.product = (scale, choices), product
        ctx.rank = adapters[0].shape[1] if adapters else 0
        return tuple(found[:count])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, ends_E, *saved = ctx.saved_tensors
        gathers, count, adapted = ctx.sizes
        order_R, slot_NK = (saved.pop(0), saved.pop(0)) if gathers else (None, None)
        seed = saved.pop(0) if ctx.masks[0] else None
        weights, a, b = saved[:count], saved[count : count + adapted], saved[count + adapted : count + 2 * adapted]
        u_RL = saved[-1] if adapted else None
        operands = coded(ctx.product, weights, 1)
        dx, *more = _backward(
            list(dys), x, order_R, slot_NK, ends_E, *operands, a, b, u_RL, *ctx.rest, seed, *ctx.masks[1:]
        )
        gradients: list[Tensor] = []
        for number in range(adapted):
            gradients += [more[0][number, :, : ctx.rank], more[1 + number][..., : ctx.rank]]
        return dx, None, None, None, None, None, None, None, *gradients


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
    first = adapters[0]
    weights, scale, pairs = (*tensors, *others), 0.0, list[Tensor]()
    if first is not None:
        weights, scale = (*tensors[::3], *others), first.scale
        pairs = [t for number, t in enumerate(tensors) if number % 3]
    assert product is None or isinstance(product, compute.CodedProduct)
    masks = launches.masks(seed, adapters)
    found: tuple[Tensor, ...] = _Experts.apply(x, order_R, slot_NK, ends_E, weights, product, scale, masks, *pairs)
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
    """Frozen weights in the dtype of x, multiplied plainly, or codes on sm_90; with equal adapters or none."""
    first = adapters[0]
    if len(adapters) > 2 or len(ends_E) >= launches.MOST_EXPERTS:
        return False
    if any((each is None) != (first is None) for each in adapters):
        return False
    kinds = {(each.rank, each.scale, each.dropout) for each in adapters if each is not None}
    if len(kinds) > 1 or any(rank > launches.MOST_RANK for rank, *_ in kinds):
        return False
    own = tensors if first is None else tensors[::3]
    if others and len(others) != len(own):
        return False
    weights = (*own, *others)
    if product is not None:
        return not others and _takes_codes(product, weights, x, dropout=first is not None and first.dropout > 0)
    if len({w.shape[1:] for w in weights}) > 1 or any(side % MULTIPLE for side in weights[0].shape[1:]):
        return False
    trained = torch.is_grad_enabled() and any(w.requires_grad for w in weights)
    return not trained and all(w.dtype == x.dtype and w.is_contiguous() for w in weights)


def _takes_codes(product: compute.GroupedProduct, weights: Sequence[Tensor], x: Tensor, *, dropout: bool) -> bool:
    """Codes without dropout, whose tiles the copy engine can bring."""
    if not isinstance(product, compute.CodedProduct) or dropout or x.dtype != torch.bfloat16:
        return False
    shapes = {codes.shape for (codes, _), _ in product.codes(weights)}
    sides = {side for shape in shapes for side in shape[1:]}
    return (
        len(shapes) == 1 and not any(side % launches.CODES.b for side in sides) and compute.capability(x.device)[0] == 9
    )


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel runs there."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def kernel() -> bundles.Kernel:
    """The kernel."""
    return bundles.Kernel(
        op="grouped_linears",
        name=NAME,
        function=grouped_linears,
        supports=supports,
        takes=takes,
        knows=frozenset({"parts", "others"}),
        priority=PRIORITY,
    )
