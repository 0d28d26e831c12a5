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

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
Forward = Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor, Tensor], None]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor, Tensor, Tensor], None]


ATTENDED = 1024
"""Tokens that one attends to on average, assumed where FLOPs are counted: documents are not known then."""


def attention_flops(q_shape: Sequence[int], *rest: Any, window: int = 0, **named: Any) -> int:
    """FLOPs of the forward of packed causal attention; q is [N, H, E]."""
    tokens, heads, features = q_shape
    attended = min(ATTENDED, -(-tokens // 2), window or ATTENDED)
    return 4 * tokens * heads * features * attended


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


def _forward_op(namespace: str, forward: Forward, room: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """The custom op (q, k, v, cu_seqlens, scale) → (out [N, H · E + room], lse)."""

    @compiled_ahead
    @torch.library.custom_op(f"{namespace}::attention", mutates_args=())
    def run(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, cu_seqlens_S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        n, heads, features = q_NHE.shape
        out = q_NHE.new_empty(n, heads * features + room)
        lse_HN = q_NHE.new_empty((heads, n), dtype=torch.float32)
        if n:
            forward(readable(q_NHE), readable(k_NKE), readable(v_NKE), cu_seqlens_S, scale, out, lse_HN)
        return out, lse_HN

    @run.register_fake
    def _(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, cu_seqlens_S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        n, heads, features = q_NHE.shape
        return q_NHE.new_empty(n, heads * features + room), q_NHE.new_empty((heads, n), dtype=torch.float32)

    register_flop_formula(getattr(torch.ops, namespace).attention)(attention_flops)
    return run


def _backward_op(namespace: str, backward: Backward) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The custom op (dy, q, k, v, out, lse, cu_seqlens, scale) → (dq, dk, dv)."""

    @compiled_ahead
    @torch.library.custom_op(f"{namespace}::attention_backward", mutates_args=())
    def run_backward(
        dy_NHE: Tensor,
        q_NHE: Tensor,
        k_NKE: Tensor,
        v_NKE: Tensor,
        out_NHE: Tensor,
        lse_HN: Tensor,
        cu_seqlens_S: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (t.new_empty(t.shape) for t in (q_NHE, k_NKE, v_NKE))
        if q_NHE.shape[0]:
            dy, q, k, v = (readable(t) for t in (dy_NHE, q_NHE, k_NKE, v_NKE))
            out, lse_HN = readable(out_NHE), lse_HN.contiguous()
            backward(dy, q, k, v, out, lse_HN, cu_seqlens_S, scale, dq, dk, dv)
        return dq, dk, dv

    @run_backward.register_fake
    def _(
        dy_NHE: Tensor,
        q_NHE: Tensor,
        k_NKE: Tensor,
        v_NKE: Tensor,
        out_NHE: Tensor,
        lse_HN: Tensor,
        cu_seqlens_S: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (t.new_empty(t.shape) for t in (q_NHE, k_NKE, v_NKE))
        return dq, dk, dv

    return run_backward


def packed_attention(namespace: str, forward: Forward, backward: Backward, room: int) -> Attention:
    """A differentiable function (q, k, v, cu_seqlens, scale) → out from two launches, as custom ops of a namespace.

    `forward(q, k, v, cu_seqlens, scale, out, lse)` fills out [N, H · E + room], of which the first
    H · E columns count, and lse [H, N] fp32, whose base is the kernels' own affair. `backward(dy, q,
    k, v, out, lse, cu_seqlens, scale, dq, dk, dv)` fills three dense gradients. Both get tensors that are `readable`
    and are not called without tokens. The last `room` columns hold nothing: `adapted_linears` writes into them, and its
    input is not copied.
    """
    run, run_backward = _forward_op(namespace, forward, room), _backward_op(namespace, backward)

    class Attend(Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
            n, heads, features = q.shape
            whole, lse = run(q, k, v, cu_seqlens, scale)
            out = whole[:, : heads * features].view(n, heads, features)
            ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
            ctx.scale = scale
            return out

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            return (*run_backward(dy, *ctx.saved_tensors, ctx.scale), None, None)

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        with region("att"):
            return Attend.apply(q, k, v, cu_seqlens, scale)

    return attention
