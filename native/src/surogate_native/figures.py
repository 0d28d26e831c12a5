"""The figures of FP8 tensors, (scale, 1 / scale, largest absolute value, 0), before their codes are made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surogate_core.formats import fp8
from surogate_core.kernels.building.native import Module

FIGURES = 4
"""Numbers of one tensor."""
MOST = 4
"""Ranges of columns, such as the projections of a panel."""
FAR = 2**30
"""Past every column."""


def padded(values: Sequence[Any], filler: Any) -> list[Any]:
    """`MOST` values."""
    return [*values, *[filler] * (MOST - len(values))]


def ends(widths: Sequence[int]) -> list[np.int32]:
    """Where each range of columns ends."""
    return [np.int32(end) for end in padded(list(accumulate(widths)), FAR)]


def begin(module: Module, x: Tensor, rows: Sequence[Tensor], widths: Sequence[int], margin: int, role: int) -> Tensor:
    """Figures [S, 4] fp32 of ranges of columns in a role; the module's source includes ``begin.cuh``."""
    figures = torch.empty((len(widths), FIGURES), dtype=torch.float32, device=x.device)
    module.launch(
        "begin",
        (len(widths),),
        1024,
        x,
        x.stride(0),
        np.int32(x.shape[0]),
        *padded(rows, rows[0]),
        np.int32(role),
        *ends(widths),
        fp8.LIMIT[fp8.KIND[role]],
        2.0**-margin,
        figures,
    )
    return figures
