"""Attention kernels that torch itself brings.

On a CPU each document goes through torch's blocked kernel; on CUDA all documents go through
torch's variable-length flash kernel in one launch. Shape suffixes as in `kernels.ops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from surogate_core.bundles import Kernel
from surogate_core.kernels.ops import region
from surogate_core.kernels.packed_attention import attention_flops

aten = torch.ops.aten


def _documents(cu_seqlens_S: Tensor) -> Iterator[slice]:
    borders = cu_seqlens_S.tolist()
    for start, stop in pairwise(borders):
        if stop > start:
            yield slice(start, stop)


def _dense(x_NHE: Tensor) -> Tensor:
    """With unit stride over E, which torch's kernels take for granted."""
    return x_NHE if x_NHE.stride(-1) == 1 else x_NHE.contiguous()


def _heads_first(x_NHE: Tensor, rows: slice) -> Tensor:
    """[1, H, rows, E], as torch's scaled-dot-product kernels take it; a view."""
    return x_NHE[rows].transpose(0, 1).unsqueeze(0)


@torch.library.custom_op("surogate::cpu_attention", mutates_args=())
def _cpu_forward(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, cu_seqlens_S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q_NHE, memory_format=torch.contiguous_format)
    lse_NH = q_NHE.new_empty(q_NHE.shape[:2], dtype=_lse_dtype(q_NHE.dtype))
    q_NHE, k_NKE, v_NKE = (_dense(t) for t in (q_NHE, k_NKE, v_NKE))
    for rows in _documents(cu_seqlens_S):
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q_NHE, rows), _heads_first(k_NKE, rows), _heads_first(v_NKE, rows), 0.0, True, scale=scale
        )
        out[rows] = o[0].transpose(0, 1)
        lse_NH[rows] = lse[0].transpose(0, 1)
    # For a query with a NaN torch's kernel gives 0, which would hide it.
    if (nan_NH := q_NHE.sum(-1).isnan()).any():
        out[nan_NH] = float("nan")
        lse_NH[nan_NH] = float("nan")
    return out, lse_NH


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@_cpu_forward.register_fake
def _(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, cu_seqlens_S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(q_NHE, memory_format=torch.contiguous_format),
        q_NHE.new_empty(q_NHE.shape[:2], dtype=_lse_dtype(q_NHE.dtype)),
    )


register_flop_formula(torch.ops.surogate.cpu_attention)(attention_flops)


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
    dy_NHE, q_NHE, k_NKE, v_NKE = (_dense(t) for t in (dy_NHE, q_NHE, k_NKE, v_NKE))
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
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        return (*_cpu_backward(dy, q, k, v, out, lse, cu_seqlens, ctx.scale), None, None)


@torch.library.custom_op("surogate::flash_attention_backward", mutates_args=())
def _flash_backward(
    dy_NHE: Tensor,
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    out_NHE: Tensor,
    lse_HN: Tensor,
    cu_seqlens_S: Tensor,
    max_seqlen: int,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # The kernel reads the random state only when it drops attention weights.
    unused = torch.empty(2, dtype=torch.int64, device=q_NHE.device)
    borders, longest = (cu_seqlens_S, cu_seqlens_S), (max_seqlen, max_seqlen)
    with _determinism(deterministic):
        dq, dk, dv = aten._flash_attention_backward(
            dy_NHE.contiguous(),
            q_NHE,
            k_NKE,
            v_NKE,
            out_NHE,
            lse_HN,
            *borders,
            *longest,
            0.0,
            True,
            unused,
            unused,
            scale=scale,
        )
    return dq, dk, dv


@_flash_backward.register_fake
def _(
    dy_NHE: Tensor,
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    out_NHE: Tensor,
    lse_HN: Tensor,
    cu_seqlens_S: Tensor,
    max_seqlen: int,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_NHE, k_NKE, v_NKE))
    return dq, dk, dv


@contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    """torch's flash backward adds dq in a fixed order only when told to, process-wide."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


class _FlashAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        deterministic: bool,
    ) -> Tensor:
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.settings = (max_seqlen, scale, deterministic)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (*_flash_backward(dy, *ctx.saved_tensors, *ctx.settings), None, None, None, None)


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """`ops.attention` on a CPU, one document at a time."""
    with region("att"):
        return _CPUAttention.apply(q, k, v, cu_seqlens, scale)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """`ops.attention` on CUDA through torch's variable-length flash kernel (fp16, bf16).

    The deterministic backward gives each document and head to few multiprocessors: on an H200 long
    documents cost a fifth to a third of a small model's speed, short ones nothing.
    """
    with region("att"):
        return _FlashAttention.apply(q, k, v, cu_seqlens, max_seqlen, scale, True)


def flash_attention_any_order(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    """The same, with dq summed in the order in which blocks finish."""
    with region("att"):
        return _FlashAttention.apply(q, k, v, cu_seqlens, max_seqlen, scale, False)


def kernels() -> tuple[Kernel, ...]:
    """The kernels of attention that torch brings."""
    floats = (torch.float32, torch.float64, torch.bfloat16)
    halves = (torch.float16, torch.bfloat16)
    return (
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
        Kernel(
            op="attention",
            name="torch-flash-any-order",
            function=flash_attention_any_order,
            supports=lambda device, dtype: device.type == "cuda" and dtype in halves,
            priority=1,
            deterministic=False,
        ),
    )
