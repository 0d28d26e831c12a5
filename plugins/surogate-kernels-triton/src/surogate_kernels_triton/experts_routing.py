"""The ops `route` and `combine` in Triton. Shape suffixes as in `surogate_core.kernels.experts`; B blocks of tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.plugin import bundles, compute
from surogate_kernels_triton import experts_programs as programs

TOKENS = 32
"""Tokens of a block of choices."""
ROWS = 8
"""Rows of a program of `combine_backward` that stops at the last row."""
MOST_EXPERTS = 1024
MOST_CHOICES = 64
DTYPES = (torch.float16, torch.bfloat16)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::route", mutates_args=())
def _route(
    logits_NE: Tensor, count: int, renormalise: bool, sigmoid: bool, correction_E: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, experts = logits_NE.shape
    if logits_NE.stride(1) != 1:
        logits_NE = logits_NE.contiguous()
    blocks, wide = triton.cdiv(n, TOKENS), triton.next_power_of_2(experts)
    weights_NK = logits_NE.new_empty(n, count, dtype=torch.float32)
    experts_NK = logits_NE.new_empty(n, count, dtype=torch.int32)
    slot_NK, order_R, ends_E = (experts_NK.new_empty(*shape) for shape in ((n, count), (n * count,), (experts,)))
    counts_BE, bases_BE = (experts_NK.new_empty(blocks, experts) for _ in range(2))
    programs.choose[blocks,](
        logits_NE,
        correction_E,
        weights_NK,
        experts_NK,
        counts_BE,
        n,
        logits_NE.stride(0),
        scale,
        compute.LEAST_TOTAL if sigmoid else 0.0,
        E=experts,
        EP=wide,
        K=count,
        KP=triton.next_power_of_2(count),
        T=TOKENS,
        RENORMALISE=renormalise,
        SIGMOID=sigmoid,
        num_warps=4 if wide <= 256 else 8,
    )
    columns = min(16, wide)
    programs.scan[triton.cdiv(experts, columns),](
        counts_BE, bases_BE, ends_E, blocks, experts, EP=wide, C=columns, B=max(8, 8192 // wide), num_warps=8
    )
    choices = TOKENS * count
    programs.scatter[blocks,](
        experts_NK,
        bases_BE,
        order_R,
        slot_NK,
        n * count,
        experts,
        CHOICES=choices,
        M=triton.next_power_of_2(choices),
        C=32,
        num_warps=8,
    )
    return weights_NK, experts_NK, order_R, slot_NK, ends_E


@_route.register_fake
def _(
    logits_NE: Tensor, count: int, renormalise: bool, sigmoid: bool, correction_E: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, experts = logits_NE.shape
    weights_NK = logits_NE.new_empty(n, count, dtype=torch.float32)
    found = [logits_NE.new_empty(*shape, dtype=torch.int32) for shape in ((n, count), (n * count,), (n, count))]
    return weights_NK, found[0], found[1], found[2], logits_NE.new_empty(experts, dtype=torch.int32)


class _Route(Function):
    @staticmethod
    def forward(ctx: Any, logits_NE: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        _, renormalise, sigmoid, _, scale = rest
        with compute.choice():
            found = _route(logits_NE, *rest)
        ctx.save_for_backward(logits_NE, found[1])
        ctx.settings = {"renormalise": renormalise, "sigmoid": sigmoid, "scale": scale}
        ctx.mark_non_differentiable(*found[1:])
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights_NK: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        return compute.route_backward(dweights_NK, *ctx.saved_tensors, **ctx.settings), *[None] * 5


def route(
    logits_NE: Tensor,
    count: int,
    renormalise: bool,
    *,
    sigmoid: bool = False,
    correction_E: Tensor | None = None,
    scale: float = 1.0,
    **groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`experts.route`; `groups`: of which all are chosen from."""
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _Route.apply(
        logits_NE, count, renormalise, sigmoid, correction_E, float(scale)
    )
    return found


def route_takes(
    logits_NE: Tensor, count: int, renormalise: bool, *, groups: int = 1, group_choices: int = 1, **named: Any
) -> bool:
    """Whether one program holds a token's scores, and all of them count."""
    return logits_NE.shape[1] <= MOST_EXPERTS and count <= MOST_CHOICES and group_choices >= groups


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::sum_rows", mutates_args=())
def sum_rows(y_RO: Tensor, slot_NK: Tensor, weights_NK: Tensor | None, parts: bool) -> Tensor:
    """[N, O]: each token's rows, times their weights if given, added in fp32 in the order of its choices; in fp32 with
    `parts`, in y's dtype without.
    """
    (n, choices), outputs = slot_NK.shape, y_RO.shape[1]
    if y_RO.stride(1) != 1:
        y_RO = y_RO.contiguous()
    out_NO = y_RO.new_empty(n, outputs, dtype=torch.float32 if parts else None)
    columns = min(1024, triton.next_power_of_2(outputs))
    programs.sum_rows[n, triton.cdiv(outputs, columns)](
        y_RO,
        slot_NK,
        slot_NK if weights_NK is None else weights_NK,
        out_NO,
        y_RO.stride(0),
        K=choices,
        OUT=outputs,
        C=columns,
        WEIGHTED=weights_NK is not None,
        num_warps=4,
    )
    return out_NO


@sum_rows.register_fake
def _(y_RO: Tensor, slot_NK: Tensor, weights_NK: Tensor | None, parts: bool) -> Tensor:
    return y_RO.new_empty(slot_NK.shape[0], y_RO.shape[1], dtype=torch.float32 if parts else None)


def weigh_rows(
    dout: Tensor,
    y_RO: Tensor,
    order_R: Tensor,
    slot_NK: Tensor,
    weights_NK: Tensor,
    *,
    by_row: bool = False,
    parts: bool,
    ends_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(each row of `dout` times its weight [R, O]; dweights [N, K] fp32, its products with the rows of y).

    `dout`: [N, O], of which a row is that of its token; or [R, O] with `by_row`. `parts`: choices may have no row.
    Rows behind the last of `ends_E` are undefined.
    """
    rows, outputs = y_RO.shape
    dout, y = (t if t.stride(1) == 1 else t.contiguous() for t in (dout, y_RO))
    dy_RO = y_RO.new_empty(rows, outputs)
    dweights_NK = (torch.zeros_like if parts else torch.empty_like)(weights_NK, memory_format=torch.contiguous_format)
    # Where choices have no row, most programs may have none either, so each has several.
    of_a_program = 1 if ends_E is None else ROWS
    programs.combine_backward[triton.cdiv(rows, of_a_program),](
        dout,
        y,
        order_R,
        slot_NK,
        weights_NK,
        dy_RO,
        dweights_NK,
        None if ends_E is None else ends_E[-1:],
        rows,
        dout.stride(0),
        y.stride(0),
        K=weights_NK.shape[1],
        OUT=outputs,
        C=min(2048, triton.next_power_of_2(outputs)),
        SORTED=by_row,
        ROWS=of_a_program,
        num_warps=4,
    )
    return dy_RO, dweights_NK


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::combine_backward", mutates_args=())
def _combine_backward(
    dout_NO: Tensor, y_RO: Tensor, order_R: Tensor, slot_NK: Tensor, weights_NK: Tensor, parts: bool
) -> tuple[Tensor, Tensor]:
    """(dy [R, O], dweights [N, K] fp32)."""
    return weigh_rows(dout_NO, y_RO, order_R, slot_NK, weights_NK, parts=parts)


@_combine_backward.register_fake
def _(
    dout_NO: Tensor, y_RO: Tensor, order_R: Tensor, slot_NK: Tensor, weights_NK: Tensor, parts: bool
) -> tuple[Tensor, Tensor]:
    return y_RO.new_empty(*y_RO.shape), torch.empty_like(weights_NK, memory_format=torch.contiguous_format)


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y_RO: Tensor, order_R: Tensor, slot_NK: Tensor, weights_NK: Tensor, parts: bool) -> Tensor:
        ctx.save_for_backward(y_RO, order_R, slot_NK, weights_NK)
        ctx.parts = parts
        return sum_rows(y_RO, slot_NK, weights_NK, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NO: Tensor) -> tuple[Tensor | None, ...]:
        dy_RO, dweights_NK = _combine_backward(dout_NO, *ctx.saved_tensors, ctx.parts)
        return dy_RO, None, None, dweights_NK, None


def combine(y_RO: Tensor, order_R: Tensor, slot_NK: Tensor, weights_NK: Tensor, *, parts: bool = False) -> Tensor:
    """`experts.combine`."""
    found: Tensor = _Combine.apply(y_RO, order_R, slot_NK, weights_NK.float().contiguous(), parts)
    return found


def _supports(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in DTYPES


def _supports_logits(device: torch.device, dtype: torch.dtype) -> bool:
    """Logits may be in fp32 where everything else is in bf16."""
    return device.type == "cuda" and dtype in (*DTYPES, torch.float32)


def kernels() -> tuple[bundles.Kernel, ...]:
    """The kernels."""
    return (
        bundles.Kernel(
            op="route",
            name="triton",
            function=route,
            supports=_supports_logits,
            takes=route_takes,
            knows=frozenset({"sigmoid", "correction_E", "scale", "groups", "group_choices"}),
            priority=10,
        ),
        bundles.Kernel(
            op="combine",
            name="triton",
            function=combine,
            supports=_supports,
            knows=frozenset({"parts"}),
            priority=10,
        ),
    )
