"""The ops `choose_tokens` and `token_bounds` in Triton, without a sort. N rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from surogate_core.plugin import bundles
from surogate_kernels_triton import sampling_programs as programs

PART = 8192
"""Logits of a row that a program reads. Always as many, so that a row's bits do not depend on the number of rows."""
LANES = 1024
MOST_PARTS = 1024
REACH = 16.0
"""How far below the largest score of a row `token_bounds` looks first. exp(−16) is 1e-7."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def exact(device: torch.device) -> bool:
    """Whether the noise has torch's logarithms, which Triton's interpreter does not have."""
    return device.type == "cuda"


@torch.library.custom_op("surogate_triton::choose_tokens", mutates_args=())
def _choose(
    logits_NV: Tensor,
    temperature_N: Tensor,
    keys_N2: Tensor,
    numbers_N: Tensor,
    bounds_N: Tensor | None,
    lasts_N: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, size = logits_NV.shape
    tokens_N, logprobs_N = temperature_N.new_empty(rows, dtype=torch.int64), torch.empty_like(temperature_N)
    if not rows:
        return tokens_N, logprobs_N
    logits = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    parts = triton.cdiv(size, PART)
    tops, sums, values = (temperature_N.new_empty(rows, parts) for _ in range(3))
    best = numbers_N.new_empty(rows, parts)
    programs.choose_part[rows * parts,](
        logits,
        temperature_N.contiguous(),
        keys_N2.contiguous(),
        numbers_N.contiguous(),
        bounds_N,
        lasts_N,
        tops,
        sums,
        values,
        best,
        logits.stride(0),
        size,
        PARTS=parts,
        B=PART,
        C=LANES,
        EXACT=exact(logits.device),
        BOUND=bounds_N is not None,
        num_warps=4,
        enable_fp_fusion=False,
    )
    programs.choose_token[rows,](
        logits,
        tops,
        sums,
        values,
        best,
        tokens_N,
        logprobs_N,
        logits.stride(0),
        size,
        PARTS=parts,
        P=triton.next_power_of_2(parts),
        num_warps=1,
    )
    return tokens_N, logprobs_N


@_choose.register_fake
def _(logits_NV: Tensor, temperature_N: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return temperature_N.new_empty(len(logits_NV), dtype=torch.int64), torch.empty_like(temperature_N)


def choose_tokens(
    logits_NV: Tensor,
    temperature_N: Tensor,
    keys_N2: Tensor,
    numbers_N: Tensor,
    bounds_N: Tensor | None = None,
    lasts_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`decoding.choose_tokens`."""
    found: tuple[Tensor, Tensor] = _choose(logits_NV, temperature_N, keys_N2, numbers_N, bounds_N, lasts_N)
    return found


def chooses(logits_NV: Tensor, temperature_N: Tensor, keys_N2: Tensor, numbers_N: Tensor, *bounds: Tensor) -> bool:
    """Whether one program holds the results of a row's parts."""
    known = temperature_N.dtype == torch.float32 and keys_N2.dtype == numbers_N.dtype == torch.int32
    return known and logits_NV.shape[1] <= PART * MOST_PARTS


@torch.library.custom_op("surogate_triton::token_bounds", mutates_args=())
def _bounds(
    logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor
) -> tuple[Tensor, Tensor]:
    rows, size = logits_NV.shape
    bounds_N, lasts_N = torch.empty_like(temperature_N), temperature_N.new_empty(rows, dtype=torch.int32)
    if not rows:
        return bounds_N, lasts_N
    logits = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    programs.token_bounds[rows,](
        logits,
        temperature_N.contiguous(),
        top_k_N.contiguous(),
        top_p_N.contiguous(),
        min_p_N.contiguous(),
        logits.new_empty(rows, size, dtype=torch.float32),
        bounds_N,
        lasts_N,
        logits.stride(0),
        size,
        REACH=REACH,
        C=4096,
        num_warps=8,
    )
    return bounds_N, lasts_N


@_bounds.register_fake
def _(
    logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(temperature_N), temperature_N.new_empty(len(logits_NV), dtype=torch.int32)


def token_bounds(
    logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor
) -> tuple[Tensor, Tensor]:
    """`decoding.token_bounds`, except that top-p decides by sums in another order than a sort's."""
    found: tuple[Tensor, Tensor] = _bounds(logits_NV, temperature_N, top_k_N, top_p_N, min_p_N)
    return found


def kernels() -> tuple[bundles.Kernel, ...]:
    """The kernels."""

    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda" and dtype in DTYPES

    def kernel(function: Callable[..., Any], takes: Callable[..., bool]) -> bundles.Kernel:
        name = function.__name__
        return bundles.Kernel(op=name, name="triton", function=function, supports=supports, takes=takes, priority=10)

    return kernel(choose_tokens, chooses), kernel(token_bounds, lambda *arguments: True)
