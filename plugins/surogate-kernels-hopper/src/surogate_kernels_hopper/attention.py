"""The op `attention` through the kernels of native/. Shape suffixes as in `surogate_core.kernels.ops`."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from surogate_core.plugin import bundles, compute

FEATURES = 128
"""Features of a head; the kernels support only this number."""
ROOM = 128
"""Additional columns after the output, which `adapted_linears` of the Triton pack uses."""
TILE = 128
"""Tokens of a tile. This and the constants below must match the sources."""
THREADS = 384
_TILE_BYTES = TILE * FEATURES * 2
_BARRIERS = 1024
FORWARD_SHARED = 5 * _TILE_BYTES + _BARRIERS
QUERIES_SHARED = 6 * _TILE_BYTES + _BARRIERS
KEYS_SHARED = 6 * _TILE_BYTES + 4 * 2 * 64 * 4 + _BARRIERS

_SOURCES = compute.Sources.of(__file__)
_FORWARD = compute.Module(_SOURCES, "attention_forward_sm90", specific=True)
_BACKWARD = compute.Module(_SOURCES, "attention_backward_sm90", specific=True)


def _rows(*tensors: Tensor) -> list[Tensor | int]:
    """Each tensor and the distance of its rows."""
    return [value for tensor in tensors for value in (tensor, tensor.stride(0))]


def _sizes(q: Tensor, k: Tensor, cu_seqlens_S: Tensor, heads: int) -> list[np.generic]:
    return [np.int32(n) for n in (cu_seqlens_S.shape[0], q.shape[0], heads, q.shape[1] // k.shape[1])]


def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_S: Tensor, scale: float, out: Tensor, lse_HN: Tensor) -> None:
    n, heads, _ = q.shape
    _FORWARD.launch(
        "attention_forward",
        (-(-n // TILE) * heads,),
        THREADS,
        *_rows(q, k, v, out),
        lse_HN,
        cu_seqlens_S,
        *_sizes(q, k, cu_seqlens_S, heads),
        scale * math.log2(math.e),
        shared=FORWARD_SHARED,
    )


def _backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_HN: Tensor,
    cu_seqlens_S: Tensor,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    n, heads, _ = q.shape
    delta_HN = torch.empty_like(lse_HN)
    factors = scale, scale * math.log2(math.e)
    _BACKWARD.launch(
        "attention_backward_queries",
        (-(-n // TILE) * heads,),
        THREADS,
        *_rows(q, k, v, out, dy),
        lse_HN,
        delta_HN,
        dq,
        cu_seqlens_S,
        *_sizes(q, k, cu_seqlens_S, heads),
        *factors,
        shared=QUERIES_SHARED,
    )
    _BACKWARD.launch(
        "attention_backward_keys",
        (-(-n // TILE) * k.shape[1],),
        THREADS,
        *_rows(q, k, v, dy),
        lse_HN,
        delta_HN,
        dk,
        dv,
        cu_seqlens_S,
        *_sizes(q, k, cu_seqlens_S, k.shape[1]),
        *factors,
        shared=KEYS_SHARED,
    )


_attention = compute.packed_attention("surogate_hopper", _forward, _backward, ROOM)


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """`ops.attention` for heads of 128 features; `scale` > 0."""
    return _attention(q, k, v, cu_seqlens, float(scale))


def kernel() -> bundles.Kernel:
    """The kernel, above Triton's in priority."""
    return bundles.Kernel(
        op="attention",
        name="hopper",
        function=attention,
        supports=lambda device, dtype: device.type == "cuda" and dtype == torch.bfloat16,
        takes=lambda q, *rest: q.shape[-1] == FEATURES and compute.one_size(q, *rest),
        priority=20,
    )
