"""The op `attention` through the kernels of native/. Shape suffixes as in `surogate_core.kernels.ops`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surogate_core.plugin import bundles, compute

ROOM = 128
"""Additional columns after the output, which `adapted_linears` of the Triton pack uses."""
TILE = 128
"""Queries of a tile. This and the constants below must match the sources."""
THREADS = 384
FAR = 1 << 30
"""A window that no document fills."""
SHORT = 4096
"""Tokens of the longest document up to which heads of 128 features take tiles of queries from a counter: 12 to 17 %
faster where packed documents have about 1000 tokens, equal at 2048, 5 % slower at 16384 (H200)."""
_BARRIERS = 1024
_SOURCES = compute.Sources.of(__file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The kernels for one number of features."""

    features: int
    keys: int = 128
    """Keys of a block of the kernels that go over keys."""
    query_tiles: int = 2
    """Tiles of queries that the forward keeps."""
    value_blocks: int = 2
    """Blocks of values that the kernel of the queries' gradient keeps."""
    own_keys: int = 128
    """Keys of a tile of the kernel of their gradients."""
    stages: int = 4
    """Blocks of 64 queries that this kernel keeps."""
    exchange: int = 0
    """Bytes of shared memory through which its warpgroups exchange weights."""
    persistent: bool = True
    """Whether a block of the forward takes tiles of queries from a counter until none is left."""
    plain: str = "attention_forward"
    """The forward without window and sinks."""
    forward: compute.Module
    backward: compute.Module

    @property
    def forward_shared(self) -> int:
        """Bytes of shared memory of the forward."""
        return (self.query_tiles * TILE + 4 * self.keys) * self.features * 2 + _BARRIERS

    @property
    def queries_shared(self) -> int:
        """Bytes of shared memory of the kernel of the queries' gradient."""
        return (2 * TILE + (2 + self.value_blocks) * self.keys) * self.features * 2 + _BARRIERS

    @property
    def keys_shared(self) -> int:
        """Bytes of shared memory of the kernel of the keys' and values' gradients."""
        stage = 2 * 64 * self.features * 2 + 2 * 64 * 4
        return 2 * self.own_keys * self.features * 2 + self.stages * stage + self.exchange + _BARRIERS


def _heads(features: int, **settings: Any) -> Heads:
    forward, backward = (
        compute.Module(_SOURCES, f"attention_{name}_{features}_sm90", specific=True) for name in ("forward", "backward")
    )
    return Heads(features=features, forward=forward, backward=backward, **settings)


HEADS = {
    # With 64 features the compiler's order of the extended kernel is the faster one, by 10 % without a window.
    64: _heads(64, plain="attention_forward_extended"),
    128: _heads(128),
    256: _heads(256, keys=64, query_tiles=1, value_blocks=1, own_keys=64, stages=2, exchange=16384, persistent=False),
}
"""Features of a head → its kernels. The kernels support only these numbers."""
LONG = compute.Module(_SOURCES, "attention_forward_long_sm90", specific=True)
"""The forward of heads of 128 features over long documents, without extensions."""


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _rows(*tensors: Tensor) -> list[Tensor | int]:
    """Each tensor and the distance of its rows."""
    return [value for tensor in tensors for value in (tensor, tensor.stride(0))]


def _sizes(q: Tensor, k: Tensor, cu_seqlens_S: Tensor) -> list[np.generic]:
    n, heads, _ = q.shape
    return [np.int32(i) for i in (cu_seqlens_S.shape[0], n, heads, heads // k.shape[1])]


def _forward_arguments(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_S: Tensor, scale: float, out: Tensor, lse_HN: Tensor
) -> tuple[Any, ...]:
    """What every forward takes."""
    sizes = _sizes(q, k, cu_seqlens_S)
    return *_rows(q, k, v, out), lse_HN, cu_seqlens_S, *sizes, scale * math.log2(math.e)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_S: Tensor,
    scale: float,
    out: Tensor,
    lse_HN: Tensor,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
) -> None:
    n, heads, features = q.shape
    kernels, tiles = HEADS[features], -(-n // TILE) * heads
    extended = bool(window) or sinks is not None
    kernels.forward.launch(
        "attention_forward_extended" if extended else kernels.plain,
        (min(tiles, _multiprocessors(q.device)) if kernels.persistent else tiles,),
        THREADS,
        *_forward_arguments(q, k, v, cu_seqlens_S, scale, out, lse_HN),
        torch.zeros(1, dtype=torch.int32, device=q.device) if kernels.persistent else 0,
        0 if sinks is None else sinks.float(),
        np.int32(window or FAR),
        shared=kernels.forward_shared,
    )


def _forward_long(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_S: Tensor, scale: float, out: Tensor, lse_HN: Tensor
) -> None:
    n, heads, features = q.shape
    LONG.launch(
        "attention_forward_long",
        (-(-n // TILE) * heads,),
        THREADS,
        *_forward_arguments(q, k, v, cu_seqlens_S, scale, out, lse_HN),
        shared=5 * TILE * features * 2 + _BARRIERS,
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
    window: int = 0,
    sinks: Tensor | None = None,
    dsinks: Tensor | None = None,
) -> None:
    n, heads, features = q.shape
    kernels, kv_heads, delta_HN = HEADS[features], k.shape[1], torch.empty_like(lse_HN)
    extended = "_extended" if window else ""
    arguments = (
        *_rows(q, k, v, out, dy),
        *(lse_HN, delta_HN, *gradients, cu_seqlens_S),
        *_sizes(q, k, cu_seqlens_S),
        *(scale, scale * math.log2(math.e)),
    )
    last = np.int32(window or FAR)
    kernels.backward.launch(
        f"attention_queries{extended}",
        (-(-n // TILE) * heads,),
        THREADS,
        *arguments,
        last,
        shared=kernels.queries_shared,
    )
    kernels.backward.launch(
        f"attention_keys{extended}",
        (-(-n // kernels.own_keys) * kv_heads,),
        THREADS,
        *arguments,
        last,
        shared=kernels.keys_shared,
    )
    if sinks is not None and dsinks is not None:
        found_H = torch.empty(heads, dtype=torch.float32, device=q.device)
        kernels.backward.launch("attention_sinks", (heads,), 512, sinks.float(), lse_HN, delta_HN, found_H, np.int32(n))
        dsinks.copy_(found_H)


_attention = compute.packed_attention("surogate_hopper", _forward, _backward, ROOM)
_attention_long = compute.packed_attention("surogate_hopper_long", _forward_long, _backward, ROOM)


def attention(
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
    """`ops.attention` for heads of 64, 128 or 256 features, with a window and sinks; `scale` > 0."""
    if q.shape[-1] == 128 and max_seqlen > SHORT and not window and sinks is None:
        return _attention_long(q, k, v, cu_seqlens, float(scale))
    return _attention(q, k, v, cu_seqlens, float(scale), window=window, sinks=sinks)


def kernel() -> bundles.Kernel:
    """The kernel, above Triton's in priority."""
    return bundles.Kernel(
        op="attention",
        name="hopper",
        function=attention,
        supports=lambda device, dtype: device.type == "cuda" and dtype == torch.bfloat16,
        takes=lambda q, *rest, **named: q.shape[-1] in HEADS and compute.one_size(q, *rest),
        knows=frozenset({"window", "sinks"}),
        priority=20,
    )
