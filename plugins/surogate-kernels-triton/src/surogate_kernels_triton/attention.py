"""The op `attention` through the Triton kernels.

Shape suffixes as in `surogate_core.kernels.ops`. Plain attention of head sizes other than `HEAD_SIZES` goes to torch's
flash kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from surogate_core.plugin import bundles, compute
from surogate_kernels_triton import attention_programs as programs

HEAD_SIZES = (64, 128, 256)
"""Features of heads that always take the kernels."""
WIDEST = 512
"""Most features of a head."""
FLASH_WIDEST = 256
"""Most features of a head in torch's flash kernel."""
SINK_ROWS = 1024
"""Rows that a program of the sinks' gradients adds at a time."""
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
    apart: bool = False
    """Whether dk and dv have a launch each, where registers hold one of them."""


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
    256: Tiles(
        forward=Tile(m=128, t=64, warps=8, stages=2),
        queries=Tile(m=128, t=32, warps=8, stages=2),
        keys=Tile(m=32, t=64, warps=8, stages=2),
    ),
    512: Tiles(
        forward=Tile(m=64, t=32, warps=8, stages=2),
        queries=Tile(m=64, t=16, warps=8, stages=2),
        keys=Tile(m=16, t=64, warps=8, stages=2, apart=True),
    ),
}
"""Padded head size → tiles for GPUs with 227 KiB of shared memory a block (sm_90, sm_100). 64 and 128 are measured on
an H200, the others chosen by what fits."""
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
    256: Tiles(
        forward=Tile(m=64, t=32, warps=8, stages=1),
        queries=Tile(m=32, t=32, warps=4, stages=1),
        keys=Tile(m=16, t=64, warps=8, stages=2, apart=True),
    ),
    512: Tiles(
        forward=Tile(m=32, t=16, warps=4, stages=1),
        queries=Tile(m=16, t=16, warps=4, stages=1),
        keys=Tile(m=16, t=16, warps=4, stages=1, apart=True),
    ),
}
"""For the others, which may have 99 KiB (sm_86, sm_89, sm_120); chosen by what fits, not measured."""


def tiles_for(device: torch.device, features: int) -> Tiles:
    """The tiles for a device and a head size, the larger of a key's and a value's, padded."""
    features = max(features, 64)
    if device.type != "cuda":  # Triton's interpreter
        return SMALL[features]
    return (HOPPER if torch.cuda.get_device_capability(device)[0] in (9, 10) else SMALL)[features]


def padded(features: int) -> int:
    """Columns of a block that holds a head's features."""
    return max(16, triton.next_power_of_2(features))


def _descriptor(x_NHE: Tensor, rows: int) -> TensorDescriptor:
    n, heads, features = x_NHE.shape
    return TensorDescriptor(x_NHE, [n, heads * features], [x_NHE.stride(0), 1], [rows, padded(features)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """The inputs that all programs share."""

    q: Tensor
    k: Tensor
    v: Tensor
    borders: Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0

    def tiles(self) -> Tiles:
        """How the programs cut it."""
        return tiles_for(self.q.device, max(padded(t.shape[2]) for t in (self.q, self.v)))

    def inputs(self, rows: int, keys: int) -> list[TensorDescriptor]:
        """The descriptors with which a program copies blocks of rows of q, k and v."""
        return [_descriptor(x, count) for x, count in ((self.q, rows), (self.k, keys), (self.v, keys))]

    def documents(self) -> tuple[Tensor, int, int]:
        """(borders, their number, tokens)."""
        return self.borders, self.borders.shape[0], self.q.shape[0]

    def options(self, tile: Tile) -> dict[str, Any]:
        """Constants and options of a launch."""
        features, values = self.q.shape[2], self.v.shape[2]
        return {
            "GROUP": self.q.shape[1] // self.k.shape[1],
            "E": features,
            "EP": padded(features),
            "F": values,
            "FP": padded(values),
            "WINDOWED": self.window > 0,
            "C": float(self.softcap),
            "M": tile.m,
            "T": tile.t,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_S: Tensor,
    scale: float,
    out: Tensor,
    lse_HN: Tensor,
    *,
    sinks: Tensor | None = None,
    **named: Any,
) -> None:
    case = _Case(q=q, k=k, v=v, borders=cu_seqlens_S, scale=scale, **named)
    n, heads, _ = q.shape
    tile = case.tiles().forward
    programs.attention_forward[triton.cdiv(n, tile.m) * heads,](
        *case.inputs(tile.m, tile.t),
        out,
        lse_HN,
        None if sinks is None else sinks.contiguous(),
        *case.documents(),
        out.stride(0),
        scale * math.log2(math.e),
        case.window,
        H=heads,
        **case.options(tile),
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
    *gradients: Tensor,
    sinks: Tensor | None = None,
    dsinks: Tensor | None = None,
    **named: Any,
) -> None:
    case = _Case(q=q, k=k, v=v, borders=cu_seqlens_S, scale=scale, **named)
    dy, delta_HN = dy.contiguous(), torch.empty_like(lse_HN)
    dq, dk, dv = gradients
    _query_gradients(case, dy, out, lse_HN, delta_HN, dq)
    _key_gradients(case, dy, lse_HN, delta_HN, dk, dv)
    if sinks is not None:
        heads, n = lse_HN.shape
        programs.attention_backward_sinks[heads,](
            sinks.contiguous(), lse_HN, delta_HN, dsinks, n, R=SINK_ROWS, num_warps=4
        )


def _query_gradients(case: _Case, dy: Tensor, out: Tensor, lse_HN: Tensor, delta_HN: Tensor, dq: Tensor) -> None:
    """Fills dq, and delta [H, N], each query's sum of dy · out."""
    n, heads, _ = case.q.shape
    tile = case.tiles().queries
    programs.attention_backward_queries[triton.cdiv(n, tile.m) * heads,](
        *case.inputs(tile.m, tile.t),
        _descriptor(dy, tile.m),
        out,
        dy,
        lse_HN,
        delta_HN,
        dq,
        *case.documents(),
        out.stride(0),
        case.scale,
        case.scale * math.log2(math.e),
        case.window,
        H=heads,
        **case.options(tile),
    )


def _key_gradients(case: _Case, dy: Tensor, lse_HN: Tensor, delta_HN: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Fills dk and dv; delta comes from `_query_gradients`."""
    n, kv_heads = case.q.shape[0], case.k.shape[1]
    tile = case.tiles().keys
    for wanted in ({"DK": True, "DV": False}, {"DK": False, "DV": True}) if tile.apart else ({"DK": True, "DV": True},):
        programs.attention_backward_keys[triton.cdiv(n, tile.t) * kv_heads,](
            *case.inputs(tile.m, tile.t),
            _descriptor(dy, tile.m),
            lse_HN,
            delta_HN,
            dk,
            dv,
            *case.documents(),
            case.scale,
            case.scale * math.log2(math.e),
            case.window,
            K=kv_heads,
            **wanted,
            **case.options(tile),
        )


_attention = compute.packed_attention("surogate_triton", _forward, _backward, ROOM)


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, **named: Any
) -> Tensor:
    """`ops.attention`; `scale` > 0. Plain attention of head sizes other than `HEAD_SIZES` takes torch's flash kernel,
    if that has it.
    """
    plain = not named and compute.one_size(q, k, v) and q.shape[2] <= FLASH_WIDEST
    if plain and q.shape[2] not in HEAD_SIZES:
        return compute.flash_attention(q, k, v, cu_seqlens, max_seqlen, scale)
    return _attention(q, k, v, cu_seqlens, scale, **named)


def takes(q_NHE: Tensor, k_NKE: Tensor, v_NKF: Tensor, *rest: Any, **named: Any) -> bool:
    """Whether rows of every operand are at 16-byte borders, and blocks hold a head."""
    return all(t.shape[2] % 8 == 0 and t.shape[2] <= WIDEST for t in (q_NHE, v_NKF))


def kernel() -> bundles.Kernel:
    """The kernel, above torch's in priority."""
    return bundles.Kernel(
        op="attention",
        name="triton",
        function=attention,
        supports=lambda device, dtype: device.type == "cuda" and dtype in DTYPES,
        takes=takes,
        knows=frozenset({"window", "softcap", "sinks"}),
        priority=10,
    )
