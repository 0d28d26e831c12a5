"""Attention kernels that torch itself brings; with the CPU kernels they are the core's own pack.

On a CPU each document goes through torch's blocked kernel; on CUDA all documents go through
torch's variable-length flash kernel in one launch. Shape suffixes as in `kernels.ops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.bundles import Kernel, KernelPack
from surogate_core.kernels import cpu
from surogate_core.kernels.ops import region

aten = torch.ops.aten


def _documents(cu_seqlens_S: Tensor) -> Iterator[slice]:
    borders = cu_seqlens_S.tolist()
    for start, stop in zip(borders, borders[1:], strict=False):
        if stop > start:
            yield slice(start, stop)


def _heads_first(x_NHE: Tensor, rows: slice) -> Tensor:
    """[1, H, rows, E], as torch's scaled-dot-product kernels take it; a view."""
    return x_NHE[rows].transpose(0, 1).unsqueeze(0)


@torch.library.custom_op("surogate::cpu_attention", mutates_args=())
def _cpu_forward(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, cu_seqlens_S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q_NHE, memory_format=torch.contiguous_format)
    lse_NH = q_NHE.new_empty(q_NHE.shape[:2], dtype=_lse_dtype(q_NHE.dtype))
    for rows in _documents(cu_seqlens_S):
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q_NHE, rows), _heads_first(k_NKE, rows), _heads_first(v_NKE, rows), 0.0, True, scale=scale
        )
        out[rows] = o[0].transpose(0, 1)
        lse_NH[rows] = lse[0].transpose(0, 1)
    return out, lse_NH


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@_cpu_forward.register_fake
def _(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, cu_seqlens_S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(q_NHE, memory_format=torch.contiguous_format),
        q_NHE.new_empty(q_NHE.shape[:2], dtype=_lse_dtype(q_NHE.dtype)),
    )


@torch.library.custom_op("surogate::cpu_attention_backward", mutates_args=())
def _cpu_backward(
    dy_NHE: Tensor,
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    out_NHE: Tensor,
    lse_NH: Tensor,
    cu_seqlens_S: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_NHE, k_NKE, v_NKE))
    heads, kv_heads = q_NHE.shape[1], k_NKE.shape[1]
    groups = heads // kv_heads
    for rows in _documents(cu_seqlens_S):
        q, k, v, o, dy = (_heads_first(t, rows) for t in (q_NHE, k_NKE, v_NKE, out_NHE, dy_NHE))
        lse = lse_NH[rows].transpose(0, 1).unsqueeze(0)
        if groups > 1:
            # torch's CPU backward wants equal head counts; the sum over the group follows.
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        gq, gk, gv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, o, lse, 0.0, True, scale=scale
        )
        if groups > 1:
            gk, gv = (t.unflatten(1, (kv_heads, groups)).sum(2) for t in (gk, gv))
        for target, value in ((dq, gq), (dk, gk), (dv, gv)):
            target[rows] = value[0].transpose(0, 1)
    return dq, dk, dv


@_cpu_backward.register_fake
def _(
    dy_NHE: Tensor,
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    out_NHE: Tensor,
    lse_NH: Tensor,
    cu_seqlens_S: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_NHE, k_NKE, v_NKE))
    return dq, dk, dv


class _CPUAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        out, lse = _cpu_forward(q, k, v, cu_seqlens, scale)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        return (*_cpu_backward(dy, q, k, v, out, lse, cu_seqlens, ctx.scale), None, None)


class _FlashAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
    ) -> Tensor:
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.max_seqlen, ctx.scale = max_seqlen, scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        # The kernel reads the random state only when it drops attention weights.
        unused = torch.empty(2, dtype=torch.int64, device=q.device)
        grads = aten._flash_attention_backward(
            dy.contiguous(),
            q,
            k,
            v,
            out,
            lse,
            cu_seqlens,
            cu_seqlens,
            ctx.max_seqlen,
            ctx.max_seqlen,
            0.0,
            True,
            unused,
            unused,
            scale=ctx.scale,
        )
        return (*grads, None, None, None)


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """`ops.attention` on a CPU, one document at a time."""
    with region("att"):
        return _CPUAttention.apply(q, k, v, cu_seqlens, scale)  # type: ignore[no-any-return]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """`ops.attention` on CUDA through torch's variable-length flash kernel (fp16, bf16)."""
    with region("att"):
        return _FlashAttention.apply(q, k, v, cu_seqlens, max_seqlen, scale)  # type: ignore[no-any-return]


def _kernels() -> tuple[Kernel, ...]:
    floats = (torch.float32, torch.float64, torch.bfloat16)
    halves = (torch.float16, torch.bfloat16)
    return (
        *cpu.kernels(),
        Kernel(
            op="attention",
            name="torch-cpu",
            function=cpu_attention,
            supports=lambda device, dtype: device.type == "cpu" and dtype in floats,
        ),
        Kernel(
            op="attention",
            name="torch-flash",
            function=flash_attention,
            supports=lambda device, dtype: device.type == "cuda" and dtype in halves,
        ),
    )


TORCH_PACK = KernelPack(name="torch", kernels=_kernels)
"""Kernels that torch brings; offered by the core."""
