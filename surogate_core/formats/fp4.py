"""E2M1, the 4-bit float (OCP microscaling formats, version 1.0): ±{0, ½, 1, 1½, 2, 3, 4, 6}, two codes a byte.

Bits 0–2 of a code are the number of its size, bit 3 is the sign. Constants are computed rather than stored, so that a
traced graph holds none. Shape suffixes: R rows, Q values of a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LARGEST = 6.0
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Values that are processed at a time, or one row: they fit into a core's cache, or fill a GPU."""


def values(codes: Tensor) -> Tensor:
    """The fp32 value of each code."""
    index = (codes & 7).float()
    size = torch.where(index < 4, index * 0.5, torch.where(index < 6, index - 2, index * 2 - 8))
    return torch.where(codes >= 8, -size, size)


def encode(x: Tensor, bits: Tensor | None = None) -> Tensor:
    """E2M1 codes of fp32 values clamped to ±6: to nearest with ties to the even code, or stochastically.

    With `bits` (int32, of x's shape) a value between two neighbours becomes the upper with the probability
    of its distance from the lower, in steps of 2⁻²⁴, so that the mean is the value.
    """
    size = x.abs().clamp(max=LARGEST)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    number = size / step
    if bits is None:
        number = number.round()
    else:
        lower = number.floor()
        uniform = ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24
        number = lower + (uniform < number - lower)
    rounded = number * step
    index = torch.where(rounded < 2, rounded * 2, torch.where(rounded < 4, rounded + 2, rounded / 2 + 4))
    return torch.where(torch.signbit(x), index + 8, index).nan_to_num(0).to(torch.uint8)


def pairs(codes_RQ: Tensor) -> Tensor:
    """[R, Q/2] uint8: two codes a byte, the first in the lower half."""
    return codes_RQ[:, ::2] | (codes_RQ[:, 1::2] << 4)


def unpaired(packed: Tensor) -> Tensor:
    """[R, Q] codes of what `pairs` made."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def strips(rows: int, inputs: int, device: torch.device) -> Iterator[slice]:
    """The rows of a matrix that are processed at a time."""
    step = max(1, CHUNK.get(device.type, 1 << 20) // inputs)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
