"""What an implementation of the op `attention` needs besides its kernels: custom ops, fakes, a backward.

Shape suffixes as in `surogate_core.kernels.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from surogate_core.kernels.building.ahead import compiled_ahead
from surogate_core.kernels.ops import region

Attention = Callable[..., Tensor]
Forward = Callable[..., None]
Backward = Callable[..., None]


ATTENDED = 1024
"""Tokens that one attends to on average, assumed where FLOPs are counted: documents are not known then."""


def attention_flops(
    q_shape: Sequence[int],
    k_shape: Sequence[int] | None = None,
    v_shape: Sequence[int] | None = None,
    borders_shape: Sequence[int] | None = None,
    scale: float = 1.0,
    window: int = 0,
    *rest: Any,
    **named: Any,
) -> int:
    """FLOPs of the forward of packed causal attention; q is [N, H, E], v [N, K, F] and like q by default."""
    tokens, heads, features = q_shape
    attended = min(ATTENDED, -(-tokens // 2), window or ATTENDED)
    return 2 * tokens * heads * (features + (v_shape or q_shape)[2]) * attended


def one_size(q_NHE: Tensor, k_NKE: Tensor, v_NKF: Tensor, *rest: Any, **named: Any) -> bool:
    """Whether values have as many features as keys; a `takes` of kernels that need it."""
    return q_NHE.shape[2] == v_NKF.shape[2]


def readable(x_NHE: Tensor) -> Tensor:
    """The tensor itself if its tokens are rows of [H · E] at 16-byte borders, otherwise a dense copy."""
    row, head, feature = x_NHE.stride()
    aligned = x_NHE.data_ptr() % 16 == 0 and row % 8 == 0
    dense = feature == 1 and (head == x_NHE.shape[2] or x_NHE.shape[1] == 1) and row >= x_NHE[0].numel()
    if aligned and dense:
        return x_NHE
    return x_NHE.clone(memory_format=torch.contiguous_format)


def _given(window: int, softcap: float, sinks: Tensor | None) -> dict[str, Any]:
    """The extensions of a call that are not their default."""
    named = {"window": window or None, "softcap": softcap or None, "sinks": sinks}
    return {name: value for name, value in named.items() if value is not None}


def _forward_op(namespace: str, forward: Forward, room: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """The custom op (q, k, v, cu_seqlens, scale, extensions) → (out [N, H · F + room], lse)."""

    @compiled_ahead
    @torch.library.custom_op(f"{namespace}::attention", mutates_args=())
    def run(
        q_NHE: Tensor,
        k_NKE: Tensor,
        v_NKF: Tensor,
        cu_seqlens_S: Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        n, heads, _ = q_NHE.shape
        out = q_NHE.new_empty(n, heads * v_NKF.shape[2] + room)
        lse_HN = q_NHE.new_empty((heads, n), dtype=torch.float32)
        if n:
            q, k, v = (readable(t) for t in (q_NHE, k_NKE, v_NKF))
            forward(q, k, v, cu_seqlens_S, scale, out, lse_HN, **_given(window, softcap, sinks_H))
        return out, lse_HN

    @run.register_fake
    def _(q_NHE: Tensor, k_NKE: Tensor, v_NKF: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        n, heads, _ = q_NHE.shape
        out = q_NHE.new_empty(n, heads * v_NKF.shape[2] + room)
        return out, q_NHE.new_empty((heads, n), dtype=torch.float32)

    register_flop_formula(getattr(torch.ops, namespace).attention)(attention_flops)
    return run


def _backward_op(namespace: str, backward: Backward) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The custom op (dy, q, k, v, out, lse, cu_seqlens, scale, extensions) → (dq, dk, dv, dsinks), the last without
    elements if there are no sinks.
    """

    def gradients(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks

    @compiled_ahead
    @torch.library.custom_op(f"{namespace}::attention_backward", mutates_args=())
    def run_backward(
        dy_NHF: Tensor,
        q_NHE: Tensor,
        k_NKE: Tensor,
        v_NKF: Tensor,
        out_NHF: Tensor,
        lse_HN: Tensor,
        cu_seqlens_S: Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dq, dk, dv, dsinks = gradients(q_NHE, k_NKE, v_NKF, sinks_H)
        if q_NHE.shape[0]:
            dy, q, k, v = (readable(t) for t in (dy_NHF, q_NHE, k_NKE, v_NKF))
            out, lse_HN = readable(out_NHF), lse_HN.contiguous()
            named = _given(window, softcap, sinks_H)
            if sinks_H is not None:
                named["dsinks"] = dsinks
            backward(dy, q, k, v, out, lse_HN, cu_seqlens_S, scale, dq, dk, dv, **named)
        else:
            dsinks.zero_()
        return dq, dk, dv, dsinks

    @run_backward.register_fake
    def _(
        dy_NHF: Tensor,
        q_NHE: Tensor,
        k_NKE: Tensor,
        v_NKF: Tensor,
        out_NHF: Tensor,
        lse_HN: Tensor,
        cu_seqlens_S: Tensor,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return gradients(q_NHE, k_NKE, v_NKF, sinks_H)

    return run_backward


def packed_attention(namespace: str, forward: Forward, backward: Backward, room: int) -> Attention:
    """A differentiable function (q, k, v, cu_seqlens, scale) → out from two launches, as custom ops of a namespace.
    It has the extensions of `ops.attention` too, as keywords.

    `forward(q, k, v, cu_seqlens, scale, out, lse)` fills out [N, H · F + room], of which the first
    H · F columns count, and lse [H, N] fp32, whose base is the kernels' own affair. `backward(dy, q,
    k, v, out, lse, cu_seqlens, scale, dq, dk, dv)` fills three dense gradients. Both get tensors that are `readable`
    and are not called without tokens. The last `room` columns hold nothing: `adapted_linears` writes into them, and its
    input is not copied.

    Both get the extensions that a call has, as keywords `window`, `softcap` and `sinks`; with sinks a backward also
    fills `dsinks` [H]. A kernel that knows none needs none of these parameters.
    """
    run, run_backward = _forward_op(namespace, forward, room), _backward_op(namespace, backward)

    class Attend(Function):
        @staticmethod
        def forward(
            ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor, *settings: Any
        ) -> Tensor:
            n, heads, _ = q.shape
            ctx.settings = settings
            whole, lse = run(q, k, v, cu_seqlens, *settings, *([] if sinks is None else [sinks]))
            out = whole[:, : heads * v.shape[2]].view(n, heads, v.shape[2])
            ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, sinks)
            return out

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            *saved, sinks = ctx.saved_tensors
            *found, dsinks = run_backward(dy, *saved, *ctx.settings, *([] if sinks is None else [sinks]))
            return *found, None if sinks is None else dsinks, None, *[None] * len(ctx.settings)

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        # Without extensions the traced call has no arguments for them.
        more = (window, softcap) if window or softcap or sinks is not None else ()
        with region("att"):
            return Attend.apply(q, k, v, sinks, cu_seqlens, scale, *more)

    return attention
