"""The op `attention` through the Triton kernels.

Shape suffixes as in `surogate_core.kernels.ops`. Head sizes that the kernels are not made for go
to torch's flash kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from surogate_core.bundles import Kernel
from surogate_core.kernels.attention import flash_attention
from surogate_core.kernels.packed_attention import one_size, packed_attention
from surogate_kernels_triton import attention_programs as programs

HEAD_SIZES = (64, 128)
ROOM = 128
"""Columns behind the output, as `adapted_linears` wants them; the engine then leaves out its copy."""
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a kernel cuts its work: M queries by T keys at a time."""

    m: int
    t: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The three kernels' tiles. Fixed: equal inputs must give equal bits on every run."""

    forward: Tile
    queries: Tile
    keys: Tile


HOPPER = {
    64: Tiles(
        forward=Tile(m=128, t=128, warps=8, stages=2),
        queries=Tile(m=128, t=64, warps=8, stages=3),
        keys=Tile(m=64, t=128, warps=8, stages=3),
    ),
    128: Tiles(
        forward=Tile(m=128, t=128, warps=8, stages=2),
        queries=Tile(m=128, t=64, warps=8, stages=2),
        keys=Tile(m=64, t=128, warps=8, stages=2),
    ),
}
"""Head size → tiles for GPUs with 227 KiB of shared memory a block (sm_90, sm_100); measured on an H200."""
SMALL = {
    64: Tiles(
        forward=Tile(m=128, t=64, warps=4, stages=2),
        queries=Tile(m=64, t=64, warps=4, stages=2),
        keys=Tile(m=32, t=64, warps=4, stages=2),
    ),
    128: Tiles(
        forward=Tile(m=64, t=32, warps=4, stages=2),
        queries=Tile(m=64, t=32, warps=4, stages=2),
        keys=Tile(m=32, t=64, warps=4, stages=1),
    ),
}
"""For the others, which may have 99 KiB (sm_86, sm_89, sm_120); chosen by what fits, not measured."""


def tiles_for(device: torch.device, features: int) -> Tiles:
    """The tiles for a device and a head size."""
    if device.type != "cuda":  # Triton's interpreter
        return SMALL[features]
    return (HOPPER if torch.cuda.get_device_capability(device)[0] in (9, 10) else SMALL)[features]


def _descriptor(x_NHE: Tensor, rows: int) -> TensorDescriptor:
    n, heads, features = x_NHE.shape
    return TensorDescriptor(x_NHE, [n, heads * features], [x_NHE.stride(0), 1], [rows, features])


def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_S: Tensor, scale: float, out: Tensor, lse_HN: Tensor) -> None:
    n, heads, features = q.shape
    tile = tiles_for(q.device, features).forward
    programs.attention_forward[triton.cdiv(n, tile.m) * heads,](
        _descriptor(q, tile.m),
        _descriptor(k, tile.t),
        _descriptor(v, tile.t),
        out,
        lse_HN,
        cu_seqlens_S,
        cu_seqlens_S.shape[0],
        n,
        out.stride(0),
        scale * math.log2(math.e),
        H=heads,
        GROUP=heads // k.shape[1],
        E=features,
        M=tile.m,
        T=tile.t,
        num_warps=tile.warps,
        num_stages=tile.stages,
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
    dy, delta_HN = dy.contiguous(), torch.empty_like(lse_HN)
    _query_gradients(dy, q, k, v, out, lse_HN, delta_HN, cu_seqlens_S, scale, dq)
    _key_gradients(dy, q, k, v, lse_HN, delta_HN, cu_seqlens_S, scale, dk, dv)


def _query_gradients(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_HN: Tensor,
    delta_HN: Tensor,
    cu_seqlens_S: Tensor,
    scale: float,
    dq: Tensor,
) -> None:
    """Fills dq, and delta [H, N], each query's sum of dy · out."""
    n, heads, features = q.shape
    tile = tiles_for(q.device, features).queries
    programs.attention_backward_queries[triton.cdiv(n, tile.m) * heads,](
        _descriptor(q, tile.m),
        _descriptor(k, tile.t),
        _descriptor(v, tile.t),
        _descriptor(dy, tile.m),
        out,
        dy,
        lse_HN,
        delta_HN,
        dq,
        cu_seqlens_S,
        cu_seqlens_S.shape[0],
        n,
        out.stride(0),
        scale,
        scale * math.log2(math.e),
        H=heads,
        GROUP=heads // k.shape[1],
        E=features,
        M=tile.m,
        T=tile.t,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _key_gradients(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse_HN: Tensor,
    delta_HN: Tensor,
    cu_seqlens_S: Tensor,
    scale: float,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Fills dk and dv; delta comes from `_query_gradients`."""
    n, heads, features = q.shape
    kv_heads = k.shape[1]
    tile = tiles_for(q.device, features).keys
    programs.attention_backward_keys[triton.cdiv(n, tile.t) * kv_heads,](
        _descriptor(q, tile.m),
        _descriptor(k, tile.t),
        _descriptor(v, tile.t),
        _descriptor(dy, tile.m),
        lse_HN,
        delta_HN,
        dk,
        dv,
        cu_seqlens_S,
        cu_seqlens_S.shape[0],
        n,
        scale,
        scale * math.log2(math.e),
        K=kv_heads,
        GROUP=heads // kv_heads,
        E=features,
        M=tile.m,
        T=tile.t,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


_attention = packed_attention("surogate_triton", _forward, _backward, ROOM)


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """`ops.attention`; `scale` > 0. Head sizes other than `HEAD_SIZES` take torch's flash kernel."""
    if q.shape[-1] not in HEAD_SIZES:
        return flash_attention(q, k, v, cu_seqlens, max_seqlen, scale)
    return _attention(q, k, v, cu_seqlens, scale)


def kernel() -> Kernel:
    """The kernel, above torch's in priority."""
    return Kernel(
        op="attention",
        name="triton",
        function=attention,
        supports=lambda device, dtype: device.type == "cuda" and dtype in DTYPES,
        takes=one_size,
        priority=10,
    )
