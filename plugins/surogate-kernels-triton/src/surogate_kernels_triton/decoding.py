"""The op `slot_attention` in Triton. Shape suffixes as in `surogate_core.kernels.decoding`.

A row's bits depend on its query, its slot and its position, and on the number of positions that a slot has: not on the
other rows, on their number or on `longest`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from surogate_native.adapters import large
from torch import Tensor

from surogate_core.plugin import bundles, compute
from surogate_kernels_triton import decoding_programs as programs
from surogate_kernels_triton.attention import padded

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 2048
"""Largest `width_of`: 512 features in 16 bits, 256 in fp32."""
MOST_HEADS = 32
"""Query heads of a key head."""
CHUNK = 256
MOST_CHUNKS = 64
"""Positions of a chunk, unless a slot would have more than `MOST_CHUNKS`."""
UNSPLIT = 16
"""Most chunks of a row that one program has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How many positions a program reads at a time."""

    t: int
    warps: int
    stages: int


def width_of(q_NHE: Tensor, v_NKE: Tensor) -> int:
    """Bytes of a position's key and value of one head, with padding."""
    return sum(padded(t.shape[2]) for t in (q_NHE, v_NKE)) * q_NHE.element_size()


def tile_for(device: torch.device, width: int) -> Tile:
    """The tile for a width (`width_of`); chosen by what fits, not measured."""
    if width > WIDEST // 2:
        return Tile(t=16, warps=4, stages=2)
    return Tile(t=64, warps=4, stages=3 if large(device) and width <= WIDEST // 4 else 2)


def chunk_for(context: int) -> int:
    """Positions of a chunk in slots with `context` positions: a power of two."""
    return max(CHUNK, triton.next_power_of_2(triton.cdiv(context, MOST_CHUNKS)))


def splits(device: torch.device, pairs: int, chunks: int) -> bool:
    """Whether each chunk has a program of its own, for `pairs` of a row and a key head."""
    if device.type != "cuda":
        return chunks > 1 and pairs < 32
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return chunks > UNSPLIT or (chunks > 1 and pairs < 4 * processors)


def _slot_attention(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    keys_STKE: Tensor,
    values_STKE: Tensor,
    slots_N: Tensor,
    positions_N: Tensor,
    longest: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    (rows, heads, features), (_, kv_heads, value_features) = q_NHE.shape, v_NKE.shape
    out_NHF = q_NHE.new_empty(rows, heads, value_features)
    if not rows:
        return out_NHF
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q_NHE, k_NKE, v_NKE))
    group = heads // kv_heads
    tile = tile_for(q.device, width_of(q, v))
    chunk = chunk_for(keys_STKE.shape[1])
    seen = min(longest, window) if window else longest
    chunks = max(1, triton.cdiv(seen - 1, chunk))
    split = splits(q.device, rows * kv_heads, chunks)
    room = (rows, kv_heads, chunks, group) if split else (0,)
    stats = q.new_empty(*room, 2, dtype=torch.float32)
    partial = q.new_empty(*room, value_features, dtype=torch.float32)
    last = keys_STKE.shape[0] - 1
    programs.slot_attention[rows * kv_heads * (chunks if split else 1),](
        *(q, k, v, keys_STKE, values_STKE, slots_N, positions_N),
        *(None if sinks is None else sinks.contiguous(), out_NHF, stats, partial),
        *(stride for t in (q, k, v) for stride in t.stride()[:2]),
        *(stride for t in (keys_STKE, values_STKE) for stride in t.stride()[:3]),
        last,
        chunks if split else 1,
        scale * math.log2(math.e),
        keys_STKE.shape[1],
        window,
        K=kv_heads,
        M=group,
        MP=padded(group),
        E=features,
        EP=padded(features),
        F=value_features,
        FP=padded(value_features),
        WINDOWED=window > 0,
        CAP=float(softcap),
        C=chunk,
        T=tile.t,
        STAGES=tile.stages,
        SPLIT=split,
        IEEE=q.dtype == torch.float32,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    if split:
        programs.slot_attention_sum[rows * heads,](
            *(stats, partial, slots_N, positions_N, out_NHF, last, chunks, window),
            K=kv_heads,
            M=group,
            F=value_features,
            FP=padded(value_features),
            WINDOWED=window > 0,
            C=chunk,
            STAGES=4,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out_NHF


slot_attention = compute.slot_attention_op("surogate_triton", _slot_attention)


def takes(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    keys_STKE: Tensor,
    values_STKE: Tensor,
    slots_N: Tensor,
    positions_N: Tensor,
    longest: int,
    scale: float,
    **named: Any,
) -> bool:
    """Whether a program holds a position's key, and caches have its layout and the dtype of the queries."""
    same = {t.dtype for t in (q_NHE, k_NKE, v_NKE, keys_STKE, values_STKE)} == {q_NHE.dtype}
    dense = keys_STKE.stride(3) == values_STKE.stride(3) == 1
    return same and dense and width_of(q_NHE, v_NKE) <= WIDEST and q_NHE.shape[1] <= MOST_HEADS * k_NKE.shape[1]


def kernels() -> tuple[bundles.Kernel, ...]:
    """The kernels."""
    return (
        bundles.Kernel(
            op="slot_attention",
            name="triton",
            function=slot_attention,
            supports=lambda device, dtype: device.type == "cuda" and dtype in DTYPES,
            takes=takes,
            knows=frozenset({"window", "softcap", "sinks"}),
            priority=10,
        ),
    )
