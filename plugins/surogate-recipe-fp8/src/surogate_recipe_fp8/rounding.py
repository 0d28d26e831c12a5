"""Rounding of a tensor's values to FP8, for reports."""

from __future__ import annotations

import torch
from torch import Tensor

from surogate_core.plugin import fp8
from surogate_recipe_fp8.scaling import LIMITS, ROLES

KINDS = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
"""The format of each of `ROLES`."""
SLACK = 1 + 2.0**-20
"""Tolerance: a scale is rounded, so the scaled largest value may slightly exceed the largest of the format."""


def rounded(x: Tensor, role: str, margin: int) -> tuple[Tensor, Tensor]:
    """(the rounded values of x in fp32, a mask of clipped values), at the scale of its own largest value."""
    column = ROLES.index(role)
    limit, wide = LIMITS[column], x.float()
    scale = fp8.scale_of(wide.abs().amax(), limit, margin=margin, old=1.0)
    codes = (wide * scale).clamp(-limit, limit).to(KINDS[column])
    return codes.float() / scale, (wide * scale).abs() > limit * SLACK
