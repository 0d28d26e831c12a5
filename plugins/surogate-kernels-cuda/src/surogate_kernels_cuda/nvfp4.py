"""Rounding to NVFP4 in two launches: the tensor's largest value, then codes and scales or their values.

Suffixes as in `surogate_core.formats.nvfp4`: R rows, K the inner dimension, P and Q the next multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surogate_core.plugin import bundles, compute, nvfp4

THREADS = 256
"""As in the source."""
DTYPES = (torch.float32, torch.bfloat16)
NOWHERE = 0
"""A pointer to what is not asked for."""

# Specific for its subnormal numbers alone: a tensor of tiny values has a factor that is one.
_MODULE = compute.Module(compute.Sources.of(__file__), "nvfp4", specific=True)


def _padded(n: int) -> int:
    return -(-n // nvfp4.BLOCK) * nvfp4.BLOCK


def _shape(x: Tensor, transposed: bool) -> tuple[int, int]:
    rows, inner = x.shape
    return (inner, rows) if transposed else (rows, inner)


def _round(
    x: Tensor,
    seed: Tensor | None,
    how: nvfp4.Operand,
    *,
    codes: Tensor | None,
    scales: Tensor | None,
    values: Tensor | None,
) -> Tensor:
    """Fill codes and scales, or values; the tensor's factor is returned."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    suffix = str(x.dtype).removeprefix("torch.")
    amax = torch.zeros(1, dtype=torch.int32, device=x.device)
    decode = torch.empty((), dtype=torch.float32, device=x.device)

    def launch(kernel: str, transposed: bool, *arguments: Any) -> None:
        rows, inner = _shape(x, transposed)
        threads = (
            _padded(rows) * _padded(inner) // nvfp4.BLOCK
            if "tiles" in kernel
            else rows * (_padded(inner) // nvfp4.BLOCK)
        )
        flags = how.four_over_six + 2 * how.rotated
        sizes = np.int32(rows), np.int32(inner), np.int32(flags)
        _MODULE.launch(
            f"nvfp4_{kernel}_{suffix}", (-(-threads // THREADS),), THREADS, x, x.stride(0), *sizes, amax, *arguments
        )

    written = [NOWHERE if t is None else t for t in (codes, scales, values)]
    # The largest value is that of the transpose too, before a rotation.
    across = how.transposed and how.rotated
    launch("amax_columns" if across else "amax_rows", across)
    if how.square:
        launch("round_tiles", False, np.int32(how.transposed), *written, decode)
    else:
        salt = np.uint32(how.salt)
        columns = np.int32(0 if values is None else values.shape[1])
        random = NOWHERE if seed is None else seed, salt
        layout = "columns" if how.transposed else "rows"
        launch(f"round_{layout}", how.transposed, *random, *written, columns, decode)
    return decode


def _empty_codes(x: Tensor, how: nvfp4.Operand) -> tuple[Tensor, Tensor, Tensor]:
    rows, inner = _shape(x, how.transposed)
    height = nvfp4.BLOCK if how.square else 1
    rows, inner = -(-rows // height) * height, _padded(inner)
    return (
        x.new_empty(rows, inner // 2, dtype=torch.uint8),
        x.new_empty(rows // height, inner // nvfp4.BLOCK, dtype=nvfp4.E4M3),
        x.new_empty((), dtype=torch.float32),
    )


def _empty_values(x: Tensor, how: nvfp4.Operand) -> tuple[Tensor, Tensor]:
    rows, inner = _shape(x, how.transposed)
    values = x.new_empty(rows, _padded(inner) if how.rotated else inner, dtype=torch.bfloat16)
    return values, x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("surogate::cuda_nvfp4_quantised", mutates_args=())
def _quantised(
    x: Tensor, seed: Tensor | None, square: bool, four_over_six: bool, transposed: bool, rotated: bool, salt: int
) -> tuple[Tensor, Tensor, Tensor]:
    how = nvfp4.Operand(square=square, four_over_six=four_over_six, transposed=transposed, rotated=rotated, salt=salt)
    codes, scales, _ = _empty_codes(x, how)
    return codes, scales, _round(x, seed, how, codes=codes, scales=scales, values=None)


@_quantised.register_fake
def _(
    x: Tensor, seed: Tensor | None, square: bool, four_over_six: bool, transposed: bool, rotated: bool, salt: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_codes(x, nvfp4.Operand(square=square, transposed=transposed))


@torch.library.custom_op("surogate::cuda_nvfp4_rounded", mutates_args=())
def _rounded(
    x: Tensor, seed: Tensor | None, square: bool, four_over_six: bool, transposed: bool, rotated: bool, salt: int
) -> tuple[Tensor, Tensor]:
    how = nvfp4.Operand(square=square, four_over_six=four_over_six, transposed=transposed, rotated=rotated, salt=salt)
    values, _ = _empty_values(x, how)
    return values, _round(x, seed, how, codes=None, scales=None, values=values)


@_rounded.register_fake
def _(
    x: Tensor, seed: Tensor | None, square: bool, four_over_six: bool, transposed: bool, rotated: bool, salt: int
) -> tuple[Tensor, Tensor]:
    return _empty_values(x, nvfp4.Operand(transposed=transposed, rotated=rotated))


def _with_operand(function: Callable[..., Any]) -> Callable[[Tensor, Tensor | None, nvfp4.Operand], Any]:
    def call(x: Tensor, seed: Tensor | None, how: nvfp4.Operand) -> Any:
        return function(x, seed, how.square, how.four_over_six, how.transposed, how.rotated, how.salt)

    return call


nvfp4_quantised = _with_operand(_quantised)
"""`surogate_core.formats.nvfp4.nvfp4_quantised`."""
nvfp4_rounded = _with_operand(_rounded)
"""`surogate_core.formats.nvfp4.nvfp4_rounded`."""


def kernels() -> tuple[bundles.Kernel, ...]:
    """The kernels as the pack offers them."""
    return tuple(
        bundles.Kernel(
            op=op,
            name="cuda",
            function=function,
            supports=lambda device, dtype: device.type == "cuda" and dtype in DTYPES,
            priority=20,
        )
        for op, function in (("nvfp4_quantised", nvfp4_quantised), ("nvfp4_rounded", nvfp4_rounded))
    )
