"""The op `attention` through the Triton kernels: custom ops, their fakes, and the autograd function.

Shape suffixes as in `surogate_core.kernels.ops`. Head sizes that the kernels are not made for go
to torch's flash kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from surogate_core.bundles import Kernel
from surogate_core.kernels.attention import flash_attention
from surogate_core.kernels.ops import region
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


def _rows(x_NHE: Tensor) -> Tensor:
    """The tensor itself where a descriptor can address it as rows of [H · E], else a dense copy."""
    row, head, feature = x_NHE.stride()
    aligned = x_NHE.data_ptr() % 16 == 0 and row % 8 == 0
    dense = feature == 1 and (head == x_NHE.shape[2] or x_NHE.shape[1] == 1) and row >= x_NHE[0].numel()
    if aligned and dense:
        return x_NHE
    return x_NHE.clone(memory_format=torch.contiguous_format)


def _descriptor(x_NHE: Tensor, rows: int) -> TensorDescriptor:
    n, heads, features = x_NHE.shape
    return TensorDescriptor(x_NHE, [n, heads * features], [x_NHE.stride(0), 1], [rows, features])


@torch.library.custom_op("surogate_triton::attention", mutates_args=())
def _forward(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, cu_seqlens_S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    n, heads, features = q_NHE.shape
    out = q_NHE.new_empty(n, heads * features + ROOM)
    lse_HN = q_NHE.new_empty((heads, n), dtype=torch.float32)
    if n == 0:
        return out, lse_HN
    tile = tiles_for(q_NHE.device, features).forward
    q, k, v = (_rows(t) for t in (q_NHE, k_NKE, v_NKE))
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
    return out, lse_HN


@_forward.register_fake
def _(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, cu_seqlens_S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    n, heads, features = q_NHE.shape
    return q_NHE.new_empty(n, heads * features + ROOM), q_NHE.new_empty((heads, n), dtype=torch.float32)


@torch.library.custom_op("surogate_triton::attention_backward", mutates_args=())
def _backward(
    dy_NHE: Tensor,
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    out_NHE: Tensor,
    lse_HN: Tensor,
    cu_seqlens_S: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    n, heads, features = q_NHE.shape
    kv_heads = k_NKE.shape[1]
    dq, dk, dv = (t.new_empty(t.shape) for t in (q_NHE, k_NKE, v_NKE))
    if n == 0:
        return dq, dk, dv
    tiles = tiles_for(q_NHE.device, features)
    q, k, v = (_rows(t) for t in (q_NHE, k_NKE, v_NKE))
    dy, out, lse_HN = _rows(dy_NHE.contiguous()), _rows(out_NHE), lse_HN.contiguous()
    delta_HN = torch.empty_like(lse_HN)
    factor = scale * math.log2(math.e)
    borders = cu_seqlens_S.shape[0]
    tile = tiles.queries
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
        borders,
        n,
        out.stride(0),
        scale,
        factor,
        H=heads,
        GROUP=heads // kv_heads,
        E=features,
        M=tile.m,
        T=tile.t,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    tile = tiles.keys
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
        borders,
        n,
        scale,
        factor,
        K=kv_heads,
        GROUP=heads // kv_heads,
        E=features,
        M=tile.m,
        T=tile.t,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return dq, dk, dv


@_backward.register_fake
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


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        n, heads, features = q.shape
        room, lse = _forward(q, k, v, cu_seqlens, scale)
        out = room[:, : heads * features].view(n, heads, features)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (*_backward(dy, *ctx.saved_tensors, ctx.scale), None, None)


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """`ops.attention`; `scale` > 0. Head sizes other than `HEAD_SIZES` take torch's flash kernel."""
    if q.shape[-1] not in HEAD_SIZES:
        return flash_attention(q, k, v, cu_seqlens, max_seqlen, scale)
    with region("att"):
        return _Attention.apply(q, k, v, cu_seqlens, scale)


def kernel() -> Kernel:
    """The kernel, above torch's in priority."""
    return Kernel(
        op="attention",
        name="triton",
        function=attention,
        supports=lambda device, dtype: device.type == "cuda" and dtype in DTYPES,
        priority=10,
    )
