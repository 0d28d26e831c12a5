"""The op `quantise_both`: FP8 codes of a matrix and of its transpose from one reading, in CUDA C++."""

from __future__ import annotations

import numpy as np
import torch
from surogate_native.figures import FIGURES, begin
from torch import Tensor

from surogate_core.plugin import bundles, compute
from surogate_core.plugin import fp8 as formats

QUANTISE_BOTH = compute.Module(compute.Sources.of(__file__, "surogate_native"), "quantise_both", specific=True)
ALIGNED = 16
"""Bytes of a load."""


@compute.compiled_ahead
@torch.library.custom_op("surogate_cuda::quantise_both", mutates_args=())
def _quantise_both(x_RC: Tensor, row: Tensor, role: int, margin: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, codes of the transpose, figures, 1 / scale 0-d).

    The last is in the figures too, but Inductor (torch 2.11) takes a view of one value as a product's scale for its
    base, and a computation of its own would be a launch for each tensor.
    """
    rows, columns = x_RC.shape
    if x_RC.stride(1) != 1 or x_RC.stride(0) * x_RC.itemsize % ALIGNED or x_RC.data_ptr() % ALIGNED:
        x_RC = x_RC.clone(memory_format=torch.contiguous_format)
    figures = begin(QUANTISE_BOTH, x_RC, [row], [columns], margin, role)
    codes = torch.empty((rows, columns), dtype=formats.KIND[role], device=x_RC.device)
    transposed = codes.new_empty((columns, rows))
    inverse = figures.new_empty(())
    QUANTISE_BOTH.launch(
        "quantise_both_e5m2" if role == formats.GRADIENT else "quantise_both_e4m3",
        (columns // formats.TILE, rows // formats.TILE),
        256,
        x_RC,
        x_RC.stride(0),
        figures,
        inverse,
        codes,
        transposed,
        *(np.int32(size) for size in (rows, columns)),
    )
    return codes, transposed, figures, inverse


@_quantise_both.register_fake
def _(x_RC: Tensor, row: Tensor, role: int, margin: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes = torch.empty(tuple(x_RC.shape), dtype=formats.KIND[role], device=x_RC.device)
    figures = torch.empty((1, FIGURES), dtype=torch.float32, device=x_RC.device)
    return codes, codes.new_empty(tuple(reversed(x_RC.shape))), figures, figures.new_empty(())


def quantise_both(x_RC: Tensor, row: Tensor, role: int, margin: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fp8.quantise_both`."""
    codes, transposed, figures, inverse = _quantise_both(x_RC, row, role, margin)
    return codes, transposed, figures[0, 2], inverse


def _supports(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype == torch.bfloat16 and compute.capability(device) >= (8, 9)


def _takes(x_RC: Tensor, row: Tensor, role: int, margin: int) -> bool:
    return all(size % formats.TILE == 0 for size in x_RC.shape)


def kernel() -> bundles.Kernel:
    """The kernel."""
    return bundles.Kernel(
        op="quantise_both", name="cuda", function=quantise_both, supports=_supports, takes=_takes, priority=10
    )
