"""A step of 8-bit AdamW in one launch for each range of a group."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from surogate_core.plugin import adamw_8bit, bundles, compute

THREADS = 256
"""This and the next three constants must match the source."""
WARP = 32
LOWEST_PATTERN, HIGHEST_PATTERN = (104 << 7) - 1, 0x3F80
TABLES_BYTES = 4096 + 8848
GROUPS = 4
"""Thread blocks per multiprocessor: each reads the tables once and then processes one block of the state after
another.
"""
NOWHERE = 0
"""A null pointer."""

# Architecture-specific only because of subnormal numbers.
_MODULE = compute.Module(compute.Sources.of(__file__), "adamw_8bit", specific=True)


@cache
def _tables(device: torch.device) -> Tensor:
    """The struct `Tables` of the source, as bytes."""
    first, second = (adamw_8bit.DynamicCode(signed=signed, device=device) for signed in (True, False))
    floats = torch.cat([first.values, first.borders, second.values, second.borders])
    patterns = slice(LOWEST_PATTERN, HIGHEST_PATTERN + 1)
    negative = slice(LOWEST_PATTERN | 0x8000, (HIGHEST_PATTERN | 0x8000) + 1)
    lowest = [second.lowest_code[patterns], first.lowest_code[patterns], first.lowest_code[negative]]
    packed = torch.cat([floats.view(torch.uint8), torch.cat(lowest).to(torch.uint8)])
    return torch.nn.functional.pad(packed, (0, TABLES_BYTES - len(packed)))


@cache
def _resident(device: torch.device) -> int:
    return GROUPS * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def adamw_8bit_update(
    grad_BK: Tensor,
    chunk: adamw_8bit.Range,
    rates: adamw_8bit.StepNumbers,
    codes: tuple[adamw_8bit.DynamicCode, adamw_8bit.DynamicCode],
    *,
    beta1: float,
    beta2: float,
) -> None:
    """`surogate_core.formats.adamw_8bit.adamw_8bit_update`."""
    group, eight = chunk.group, len(chunk.first) == 2
    narrow = group.seed is not None
    needed = -(-len(grad_BK) // (THREADS // WARP))
    salt, first = compute.place(group, chunk.start)
    _MODULE.launch(
        f"adamw_8bit_{'' if eight else 'small_'}{'bfloat16' if narrow else 'float32'}",
        (min(needed, _resident(grad_BK.device)),),
        THREADS,
        chunk.master_BK,
        grad_BK,
        *(chunk.first if eight else (chunk.first[0], NOWHERE)),
        *(chunk.second if eight else (chunk.second[0], NOWHERE)),
        len(grad_BK),
        rates.lr,
        rates.clip,
        rates.skip,
        rates.size,
        rates.epsilon,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        group.weight_decay,
        _tables(grad_BK.device),
        NOWHERE if group.seed is None else group.seed,
        np.uint32(salt),
        np.uint32(first),
    )


def kernel() -> bundles.Kernel:
    """The kernel as the pack offers it."""
    return bundles.Kernel(
        op="adamw_8bit_update",
        name="cuda",
        function=adamw_8bit_update,
        supports=lambda device, dtype: device.type == "cuda" and dtype == torch.float32,
        priority=20,
    )
