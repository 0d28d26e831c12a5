"""The op `norm_rope` in Triton; its backward puts the gradients of q, k and v side by side.

There is room behind them, as the backward of `adapted_linears` wants it; the engine then leaves out
its copy. Suffixes as in `surogate_core.kernels.ops`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.plugin import bundles, compute, ops
from surogate_kernels_triton import norm_rope_programs as programs

ROOM = 128
"""Columns behind the gradients."""
TILE = 32
HEAD_SIZES = (32, 64, 128, 256)


def _rows(x_NHE: Tensor) -> Tensor:
    """The tensor itself if the heads of a token are adjacent, otherwise a dense copy."""
    _, head, feature = x_NHE.stride()
    return x_NHE if feature == 1 and head == x_NHE.shape[2] else x_NHE.contiguous()


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::norm_rope", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, q_norm_E: Tensor, k_norm_E: Tensor, eps: float, cos_NE: Tensor, sin_NE: Tensor
) -> tuple[Tensor, Tensor]:
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    q, k = _rows(q), _rows(k)
    n, heads, features = q.shape
    programs.norm_rope[triton.cdiv(n, TILE) * (heads + k.shape[1]),](
        q,
        k,
        q_norm_E,
        k_norm_E,
        cos_NE.contiguous(),
        sin_NE.contiguous(),
        q_out,
        k_out,
        eps,
        n,
        q.stride(0),
        k.stride(0),
        H=heads,
        K=k.shape[1],
        E=features,
        M=TILE,
        num_warps=4,
    )
    return q_out, k_out


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, q_norm_E: Tensor, k_norm_E: Tensor, eps: float, cos_NE: Tensor, sin_NE: Tensor
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::norm_rope_backward", mutates_args=())
def _backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    k: Tensor,
    q_norm_E: Tensor,
    k_norm_E: Tensor,
    eps: float,
    cos_NE: Tensor,
    sin_NE: Tensor,
    norms: bool,
) -> tuple[Tensor, Tensor]:
    dq, dk, dv, q, k = (_rows(t) for t in (dq, dk, dv, q, k))
    n, heads, features = q.shape
    kv_heads = k.shape[1]
    out = q.new_empty(n, (heads + 2 * kv_heads) * features + ROOM)
    tiles = triton.cdiv(n, TILE)
    parts = q.new_empty((tiles if norms else 0, heads + kv_heads, features), dtype=torch.float32)
    programs.norm_rope_backward[tiles * (heads + 2 * kv_heads),](
        dq,
        dk,
        dv,
        q,
        k,
        q_norm_E,
        k_norm_E,
        cos_NE.contiguous(),
        sin_NE.contiguous(),
        out,
        parts,
        eps,
        n,
        dq.stride(0),
        dk.stride(0),
        dv.stride(0),
        q.stride(0),
        k.stride(0),
        out.stride(0),
        H=heads,
        K=kv_heads,
        E=features,
        M=TILE,
        NORMS=norms,
        num_warps=4,
    )
    return out, parts.sum(0) if norms else parts.new_empty(parts.shape[1:])


@_backward.register_fake
def _(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    k: Tensor,
    q_norm_E: Tensor,
    k_norm_E: Tensor,
    eps: float,
    cos_NE: Tensor,
    sin_NE: Tensor,
    norms: bool,
) -> tuple[Tensor, Tensor]:
    n, heads, features = q.shape
    out = q.new_empty(n, (heads + 2 * k.shape[1]) * features + ROOM)
    return out, q.new_empty((heads + k.shape[1], features), dtype=torch.float32)


class _NormRope(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(q, k, q_norm, k_norm, cos, sin)
        ctx.eps = eps
        return (*_forward(q, k, q_norm, k_norm, eps, cos, sin), v.view_as(v))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        q, k, q_norm, k_norm, cos, sin = ctx.saved_tensors
        n, heads, features = q.shape
        kv_heads = k.shape[1]
        norms = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        out, sums_HE = _backward(dq, dk, dv, q, k, q_norm, k_norm, ctx.eps, cos, sin, norms)
        first, second, third = (features * count for count in (heads, heads + kv_heads, heads + 2 * kv_heads))
        gq, gk, gv = out[:, :first], out[:, first:second], out[:, second:third]
        dq_norm = sums_HE[:heads].sum(0).to(q_norm.dtype) if norms else None
        dk_norm = sums_HE[heads:].sum(0).to(k_norm.dtype) if norms else None
        shape = n, -1, features
        return gq.view(shape), gk.view(shape), gv.view(shape), dq_norm, dk_norm, None, None, None


def norm_rope(
    q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.norm_rope`; head sizes other than `HEAD_SIZES` take the reference."""
    found: tuple[Tensor, Tensor, Tensor]
    if q.shape[-1] not in HEAD_SIZES:
        found = compute.references["norm_rope"].function(q, k, v, q_norm, k_norm, eps, cos, sin)
        return found
    with ops.region("qkv"):
        found = _NormRope.apply(q, k, v, q_norm, k_norm, eps, cos, sin)
    return found


def kernel() -> bundles.Kernel:
    """The kernel."""
    return bundles.Kernel(
        op="norm_rope",
        name="triton",
        function=norm_rope,
        supports=lambda device, dtype: device.type == "cuda" and dtype in (torch.float16, torch.bfloat16),
        priority=10,
    )
