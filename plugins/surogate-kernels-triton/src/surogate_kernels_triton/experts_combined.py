"""The op `combined_linear` for a frozen weight with an adapter: the last projection of experts and the sum of its rows.

With d = dout of a row's token, w the row's weight and M = W + scale·B A of its expert: the row's y is x Mᵀ, so that
dx = w · (d M) and dw = d · y = (d M) · x. The backward therefore needs no y, and reads d from the tokens. Suffixes as
in `surogate_core.kernels.experts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from surogate_core.plugin import bundles, compute
from surogate_kernels_triton import experts_frozen as frozen
from surogate_kernels_triton import experts_launches as launches
from surogate_kernels_triton.experts_routing import sum_rows, weigh_rows


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::experts_combined", mutates_args=())
def _forward(
    x_RI: Tensor,
    slot_NK: Tensor,
    ends_E: Tensor,
    weights_NK: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: float,
    seed: Tensor | None,
    p: float,
    salts: Sequence[int],
    parts: bool,
) -> list[Tensor]:
    """The sum of each token's rows and, with an adapter, u [R, L]."""
    dropout = launches.Dropout.made(seed, p, salts)
    y_RO, *u = frozen.project(x_RI, None, ends_E, weights, scales, a, b, scale, 1, dropout)
    return [sum_rows(y_RO, slot_NK, weights_NK, parts), *u]


@_forward.register_fake
def _(
    x_RI: Tensor,
    slot_NK: Tensor,
    ends_E: Tensor,
    weights_NK: Tensor,
    weights: Sequence[Tensor],
    scales: Any,
    a: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    out_NO = x_RI.new_empty(slot_NK.shape[0], weights[0].shape[1], dtype=torch.float32 if rest[-1] else None)
    return [out_NO, *(x_RI.new_empty(x_RI.shape[0], each.shape[1]) for each in a)]


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::experts_combined_backward", mutates_args=())
def _backward(
    dout_NO: Tensor,
    x_RI: Tensor,
    order_R: Tensor,
    slot_NK: Tensor,
    ends_E: Tensor,
    weights_NK: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    u: Sequence[Tensor],
    scale: float,
    seed: Tensor | None,
    p: float,
    salts: Sequence[int],
    parts: bool,
) -> list[Tensor]:
    """dx, dweights and, with an adapter, dA and dB, both fp32."""
    (dout_NO,), (x_RI,) = launches.rows_apart([dout_NO.to(x_RI.dtype)]), launches.rows_apart([x_RI])
    rows, choices, dropout = len(x_RI), weights_NK.shape[1], launches.Dropout.made(seed, p, salts)
    table_T4 = launches.tile_table(ends_E, rows, launches.ROWS) if a else None
    du_RL = x_RI.new_empty(rows, a[0].shape[1]) if a else None
    if du_RL is not None and table_T4 is not None:
        named = {"choices": choices, "scale": scale, "transposed": True}
        launches.down(dout_NO, order_R, table_T4, b, du_RL, **named)  # type: ignore[arg-type]
    rest: Any = {"choices": choices, "scale": 1.0, "backward": True, "dtype": x_RI.dtype, "dropout": dropout}
    left, right = launches.operands([dout_NO], scales), launches.paired(weights, scales)
    dx_RI = launches.multiplied(left, right, du_RL, a, order_R, ends_E, rows, **rest)
    weighed: Any = {"by_row": True, "parts": parts, "ends_E": ends_E if parts else None}
    dx_RI, dweights_NK = weigh_rows(dx_RI, x_RI, order_R, slot_NK, weights_NK, **weighed)
    found = [dx_RI, dweights_NK]
    if du_RL is not None:
        weights_R1 = weights_NK.flatten()[order_R][:, None]
        du_RL, u_RL = ((t * weights_R1).to(t.dtype) for t in (du_RL, u[0]))
        found += [x_RI.new_empty(1, *a[0].shape, dtype=torch.float32), torch.empty_like(b[0], dtype=torch.float32)]
        rank = a[0].shape[1]
        launches.factors(x_RI, du_RL, None, ends_E, found[2], choices=1, rank=rank, dropout=dropout)
        launches.factors(dout_NO, u_RL, order_R, ends_E, found[3], choices=choices, rank=rank, scale=scale)
    return found


@_backward.register_fake
def _(
    dout_NO: Tensor,
    x_RI: Tensor,
    order_R: Tensor,
    slot_NK: Tensor,
    ends_E: Tensor,
    weights_NK: Tensor,
    weights: Sequence[Tensor],
    scales: Any,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    found = [x_RI.new_empty(*x_RI.shape), torch.empty_like(weights_NK, memory_format=torch.contiguous_format)]
    if a:
        found.append(x_RI.new_empty(1, *a[0].shape, dtype=torch.float32))
        found.append(x_RI.new_empty(*b[0].shape, dtype=torch.float32))
    return found


def _area(shapes: Any) -> int:
    return sum(shape[1] * shape[2] for shape in shapes)


@register_flop_formula(torch.ops.surogate_triton.experts_combined)
def _flops(
    x: Any, slot: Any, ends: Any, weights: Any, w: Any, scales: Any, a: Any, b: Any, *rest: Any, **named: Any
) -> int:
    return 2 * x[0] * _area([w[0], *a, *b])


@register_flop_formula(torch.ops.surogate_triton.experts_combined_backward)
def _backward_flops(
    dout: Any,
    x: Any,
    order: Any,
    slot: Any,
    ends: Any,
    weights: Any,
    w: Any,
    scales: Any,
    a: Any,
    b: Any,
    *rest: Any,
    **named: Any,
) -> int:
    return 2 * x[0] * (_area(w[:1]) + 2 * _area([*a, *b]))


@compute.workspace(torch.ops.surogate_triton.experts_combined)
def _bytes(
    x_RI: Tensor,
    slot_NK: Tensor,
    ends_E: Tensor,
    weights_NK: Tensor,
    weights: Sequence[Tensor],
    scales: Any,
    *rest: Any,
) -> int:
    """The rows before they are added, and the codes of x."""
    return len(x_RI) * weights[0].shape[1] * x_RI.itemsize + (x_RI.numel() if scales else 0)


@compute.workspace(torch.ops.surogate_triton.experts_combined_backward)
def _backward_bytes(
    dout_NO: Tensor,
    x_RI: Tensor,
    order_R: Tensor,
    slot_NK: Tensor,
    ends_E: Tensor,
    weights_NK: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    u: Sequence[Tensor],
    scale: float,
    *rest: Any,
) -> int:
    """dx before it is weighted, du and u with and without weights, dout as it is multiplied, and its codes."""
    kept = len(x_RI) * x_RI.itemsize * (x_RI.shape[1] + sum(3 * each.shape[1] for each in a))
    kept += dout_NO.numel() * x_RI.itemsize if dout_NO.dtype != x_RI.dtype else 0
    return kept + (dout_NO.numel() if scales else 0)


class _Combined(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        where: Sequence[Tensor],
        weights_NK: Tensor,
        weights: Sequence[Tensor],
        product: compute.CodedProduct | None,
        scale: float,
        masks: tuple[Tensor | None, float, tuple[int, ...]],
        parts: bool,
        *adapter: Tensor,
    ) -> Tensor:
        _, slot_NK, ends_E = where
        a = [launches.padded(t.to(x_RI.dtype), 1).contiguous() for t in adapter[:1]]
        b = [launches.padded(t.to(x_RI.dtype), 2).contiguous() for t in adapter[1:]]
        operands, scales = frozen.coded(product, weights, 0)
        out_NO, *u = _forward(x_RI, slot_NK, ends_E, weights_NK, operands, scales, a, b, scale, *masks, parts)
        seed = [] if masks[0] is None else [masks[0]]
        ctx.save_for_backward(*seed, x_RI, *where, weights_NK, *weights, *a, *b, *u)
        ctx.scale, ctx.product, ctx.masks = scale, product, (len(seed), *masks[1:], parts)
        ctx.rank = adapter[0].shape[1] if adapter else 0
        return out_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NO: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors[ctx.masks[0] :]
        seed = ctx.saved_tensors[0] if ctx.masks[0] else None
        inputs, sides = saved[:5], [[t] for t in saved[-3:]] if ctx.rank else [[], [], []]
        operands, scales = frozen.coded(ctx.product, saved[5:-3] if ctx.rank else saved[5:], 1)
        dx, dweights, *more = _backward(dout_NO, *inputs, operands, scales, *sides, ctx.scale, seed, *ctx.masks[1:])
        gradients = [more[0][0, :, : ctx.rank], more[1][..., : ctx.rank]] if more else []
        return dx, None, dweights, None, None, None, None, None, *gradients


def rewrite(joint: fx.Graph) -> None:
    """Let the backward read the gradient of the sums before it is widened, where a rank gets it in x's dtype: it would
    narrow it again.
    """
    for node in joint.nodes:
        if node.target != torch.ops.surogate_triton.experts_combined_backward.default:
            continue
        wide, x = node.args[:2]
        if wide.target == torch.ops.aten._to_copy.default and wide.meta["val"].dtype == torch.float32:
            (source,) = wide.args
            if source.meta["val"].dtype == x.meta["val"].dtype:
                node.update_arg(0, source)


def combined_linear(
    x_RI: Tensor,
    order_R: Tensor,
    slot_NK: Tensor,
    ends_E: Tensor,
    weights_NK: Tensor,
    seed: Tensor | None,
    adapter: compute.ExpertAdapter | None,
    product: compute.GroupedProduct | None,
    *tensors: Tensor,
    parts: bool = False,
    others: Sequence[Tensor] = (),
) -> Tensor:
    """`experts.combined_linear` where `takes` accepts the arguments; gradients of the adapter are fp32."""
    scale, where = 0.0 if adapter is None else adapter.scale, (order_R, slot_NK, ends_E)
    assert product is None or isinstance(product, compute.CodedProduct)
    weights_NK = weights_NK.float().contiguous()
    masks = launches.masks(seed, [adapter])
    found: Tensor = _Combined.apply(
        x_RI, where, weights_NK, (tensors[0], *others), product, scale, masks, parts, *tensors[1:]
    )
    return found


def takes(
    x_RI: Tensor,
    order_R: Tensor,
    slot_NK: Tensor,
    ends_E: Tensor,
    weights_NK: Tensor,
    seed: Tensor | None,
    adapter: compute.ExpertAdapter | None,
    product: compute.GroupedProduct | None,
    *tensors: Tensor,
    parts: bool = False,
    others: Sequence[Tensor] = (),
) -> bool:
    """What the kernel of `grouped_linears` takes; otherwise the reference calls that op and `combine`."""
    return frozen.takes(x_RI, None, None, ends_E, seed, [adapter], product, *tensors, others=others)


def kernel() -> bundles.Kernel:
    """The kernel."""
    return bundles.Kernel(
        op="combined_linear",
        name=frozen.NAME,
        function=combined_linear,
        supports=frozen.supports,
        takes=takes,
        knows=frozenset({"parts", "others"}),
        priority=frozen.PRIORITY,
    )
