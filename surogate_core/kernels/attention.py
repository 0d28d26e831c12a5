"""Attention kernels that torch itself brings.

On a CPU each document goes through torch's blocked kernel; on CUDA all documents go through
torch's variable-length flash kernel in one launch. Shape suffixes as in `kernels.ops`.

The CPU's knows a window and sinks. A window cuts a document into spans of queries, each with the keys that it reaches.
Sinks change the result of the kernel afterwards: they add to the sum of each row, whose logarithm it returns. A soft
cap is not to be had from outside, so the reference computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from surogate_core.bundles import Kernel
from surogate_core.kernels.ops import region
from surogate_core.kernels.packed_attention import attention_flops, one_size

aten = torch.ops.aten


def _documents(cu_seqlens_S: Tensor) -> Iterator[slice]:
    borders = cu_seqlens_S.tolist()
    for start, stop in pairwise(borders):
        if stop > start:
            yield slice(start, stop)


SPAN = 512
"""Largest number of queries of a call where there is a window. Its mask has SPAN · (SPAN + window) values."""
SHORTEST = 64
"""Number of queries of a call if the window is narrower than that."""


def _spans(cu_seqlens_S: Tensor, window: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(queries, the keys that they reach, what they see of them, or None for a causal square).

    Spans count from the beginning of a document, so that its bits do not depend on its place in the row.
    """
    size = min(SPAN, max(window, SHORTEST))
    for rows in _documents(cu_seqlens_S):
        if not 0 < window < rows.stop - rows.start:
            yield rows, rows, None
            continue
        for first in range(rows.start, rows.stop, size):
            queries = slice(first, min(first + size, rows.stop))
            keys = slice(max(rows.start, first - window + 1), queries.stop)
            before = torch.arange(queries.start, queries.stop)[:, None] - torch.arange(keys.start, keys.stop)
            hidden = (before < 0) | (before >= window)
            yield queries, keys, torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _dense(x_NHE: Tensor) -> Tensor:
    """With unit stride over E, which torch's kernels take for granted."""
    return x_NHE if x_NHE.stride(-1) == 1 else x_NHE.contiguous()


def _heads_first(x_NHE: Tensor, rows: slice) -> Tensor:
    """[1, H, rows, E], as torch's scaled-dot-product kernels take it; a view."""
    return x_NHE[rows].transpose(0, 1).unsqueeze(0)


@torch.library.custom_op("surogate::cpu_attention", mutates_args=())
def _cpu_forward(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, cu_seqlens_S: Tensor, scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q_NHE, memory_format=torch.contiguous_format)
    lse_NH = q_NHE.new_empty(q_NHE.shape[:2], dtype=_lse_dtype(q_NHE.dtype))
    q_NHE, k_NKE, v_NKE = (_dense(t) for t in (q_NHE, k_NKE, v_NKE))
    for rows, keys, mask in _spans(cu_seqlens_S, window, q_NHE.dtype):
        q, k, v = _heads_first(q_NHE, rows), _heads_first(k_NKE, keys), _heads_first(v_NKE, keys)
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
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
def _(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, cu_seqlens_S: Tensor, scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(q_NHE, memory_format=torch.contiguous_format),
        q_NHE.new_empty(q_NHE.shape[:2], dtype=_lse_dtype(q_NHE.dtype)),
    )


@register_flop_formula(torch.ops.surogate.cpu_attention)
def _(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    borders_shape: Sequence[int],
    scale: float,
    window: int = 0,
    **named: Any,
) -> int:
    return attention_flops(q_shape, window=window)


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
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.empty_like(q_NHE, memory_format=torch.contiguous_format)
    # With a window the spans of a key's readers add to it one after the other.
    wide = torch.promote_types(k_NKE.dtype, torch.float32)
    make = partial(torch.zeros_like, dtype=wide) if window else torch.empty_like
    dk, dv = (make(t, memory_format=torch.contiguous_format) for t in (k_NKE, v_NKE))
    dy_NHE, q_NHE, k_NKE, v_NKE = (_dense(t) for t in (dy_NHE, q_NHE, k_NKE, v_NKE))
    heads, kv_heads = q_NHE.shape[1], k_NKE.shape[1]
    groups = heads // kv_heads
    for rows, keys, mask in _spans(cu_seqlens_S, window, q_NHE.dtype):
        q, o, dy = (_heads_first(t, rows) for t in (q_NHE, out_NHE, dy_NHE))
        k, v = (_heads_first(t, keys) for t in (k_NKE, v_NKE))
        lse = lse_NH[rows].transpose(0, 1).unsqueeze(0)
        if groups > 1:
            # torch's CPU backward wants equal head counts; the sum over the group follows.
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        gq, gk, gv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, o, lse, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        if groups > 1:
            gk, gv = (t.unflatten(1, (kv_heads, groups)).sum(2) for t in (gk, gv))
        dq[rows] = gq[0].transpose(0, 1)
        for target, value in ((dk, gk), (dv, gv)):
            if window:
                target[keys] += value[0].transpose(0, 1)
            else:
                target[keys] = value[0].transpose(0, 1)
    return dq, dk.to(k_NKE.dtype), dv.to(v_NKE.dtype)


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
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_NHE, k_NKE, v_NKE))
    return dq, dk, dv


class _CPUAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        cu_seqlens: Tensor,
        scale: float,
        window: int,
    ) -> Tensor:
        out, lse = _cpu_forward(q, k, v, cu_seqlens, scale, window)
        if sinks is not None:
            out, lse = _with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, sinks)
        ctx.settings = (scale, window)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, sinks = ctx.saved_tensors
        dq, dk, dv = _cpu_backward(dy, *tensors, *ctx.settings)
        dsinks = None
        if sinks is not None:
            _, _, _, out_NHE, lse_NH, _ = tensors
            # The derivative of a row's sum of weighted values by a weight of its own that carries no value.
            shares_NH = torch.exp(sinks.to(lse_NH.dtype) - lse_NH)
            products_NH = (dy.to(lse_NH.dtype) * out_NHE.to(lse_NH.dtype)).sum(-1)
            dsinks = -(shares_NH * products_NH).sum(0).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None, None


def _with_sinks(out_NHE: Tensor, lse_NH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """A result of attention and its logarithms of sums after sinks have joined the sums."""
    whole_NH = torch.logaddexp(lse_NH, sinks_H.to(lse_NH.dtype))
    share_NH1 = torch.exp(lse_NH - whole_NH).unsqueeze(-1)
    return (out_NHE * share_NH1).to(out_NHE.dtype), whole_NH


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
    """Let torch's flash backward add dq in a fixed order; the switch is process-wide."""
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


def cpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`ops.attention` on a CPU, one document at a time, without a soft cap."""
    with region("att"):
        return _CPUAttention.apply(q, k, v, sinks, cu_seqlens, scale, window)


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
            knows=frozenset({"window", "sinks"}),
            takes=one_size,
        ),
        Kernel(
            op="attention",
            name="torch-flash",
            function=flash_attention,
            supports=lambda device, dtype: device.type == "cuda" and dtype in halves,
            takes=one_size,
        ),
        Kernel(
            op="attention",
            name="torch-flash-any-order",
            function=flash_attention_any_order,
            supports=lambda device, dtype: device.type == "cuda" and dtype in halves,
            takes=one_size,
            priority=1,
            deterministic=False,
        ),
    )
