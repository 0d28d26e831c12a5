"""The op `choose_tokens` in Triton: the logits are read once. N rows, V vocabulary."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from surogate_core.bundles import Kernel
from surogate_kernels_triton import sampling_programs as programs

PART = 8192
"""Logits of a row that a program reads. Always as many, so that a row's bits do not depend on the number of rows."""
LANES = 1024
MOST_PARTS = 1024
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def exact(device: torch.device) -> bool:
    """Whether the noise has torch's logarithms, which Triton's interpreter does not have."""
    return device.type == "cuda"


@torch.library.custom_op("surogate_triton::choose_tokens", mutates_args=())
def _choose(logits_NV: Tensor, temperature_N: Tensor, keys_N2: Tensor, numbers_N: Tensor) -> tuple[Tensor, Tensor]:
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
def _(logits_NV: Tensor, temperature_N: Tensor, keys_N2: Tensor, numbers_N: Tensor) -> tuple[Tensor, Tensor]:
    return temperature_N.new_empty(len(logits_NV), dtype=torch.int64), torch.empty_like(temperature_N)


def choose_tokens(
    logits_NV: Tensor, temperature_N: Tensor, keys_N2: Tensor, numbers_N: Tensor
) -> tuple[Tensor, Tensor]:
    """`decoding.choose_tokens`."""
    found: tuple[Tensor, Tensor] = _choose(logits_NV, temperature_N, keys_N2, numbers_N)
    return found


def takes(logits_NV: Tensor, temperature_N: Tensor, keys_N2: Tensor, numbers_N: Tensor) -> bool:
    """Whether one program holds the results of a row's parts."""
    known = temperature_N.dtype == torch.float32 and keys_N2.dtype == numbers_N.dtype == torch.int32
    return known and logits_NV.shape[1] <= PART * MOST_PARTS


def kernels() -> tuple[Kernel, ...]:
    """The kernels."""
    return (
        Kernel(
            op="choose_tokens",
            name="triton",
            function=choose_tokens,
            supports=lambda device, dtype: device.type == "cuda" and dtype in DTYPES,
            takes=takes,
            priority=10,
        ),
    )
