"""What FP8 makes of a tensor's values, for reports."""

from __future__ import annotations

import torch
from torch import Tensor

from surogate_core.formats.fp8 import scale_of
from surogate_recipe_fp8.scaling import LIMITS, ROLES

KINDS = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
"""The format of each of `ROLES`."""
SLACK = 1 + 2.0**-20
"""A scale is rounded, so the largest value itself may come out a little above the largest of the format."""


def rounded(x: Tensor, role: str, margin: int) -> tuple[Tensor, Tensor]:
    """(values that x rounds to in fp32, where it is cut off), at the scale of its own largest value."""
    column = ROLES.index(role)
    limit, wide = LIMITS[column], x.float()
    scale = scale_of(wide.abs().amax(), limit, margin=margin, old=1.0)
    codes = (wide * scale).clamp(-limit, limit).to(KINDS[column])
    return codes.float() / scale, (wide * scale).abs() > limit * SLACK
