"""The op `causal_convolution` in Triton, without states before the runs or behind them.

Shape suffixes as in `surogate_core.kernels.convolutions`: N rows, C channels, W width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.plugin import bundles, compute
from surogate_kernels_triton import convolutions_programs as programs
from surogate_kernels_triton.scans import with_adjacent_features

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 8
"""Most inputs that an output has."""
ROWS, CHANNELS = 32, 128
"""A program takes so many. They are fixed because sums over rows must have the same bits on every run."""


def _grid(rows: int, channels: int) -> tuple[int, int]:
    return triton.cdiv(rows, ROWS), triton.cdiv(channels, CHANNELS)


def _options(weight_CW: Tensor) -> dict[str, Any]:
    return {"W": weight_CW.shape[1], "R": ROWS, "C": CHANNELS, "num_warps": 4, "enable_fp_fusion": False}


def _dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::causal_convolution", mutates_args=())
def _forward(x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, borders: Tensor) -> Tensor:
    x, y = with_adjacent_features(x_NC), _dense(x_NC)
    rows, channels = x.shape
    if rows:
        programs.convolve[_grid(rows, channels)](
            x,
            weight_CW.contiguous(),
            bias_C,
            borders,
            len(borders) - 1,
            y,
            rows,
            channels,
            x.stride(0),
            **_options(weight_CW),
        )
    return y


@_forward.register_fake
def _(x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, borders: Tensor) -> Tensor:
    return _dense(x_NC)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::causal_convolution_backward", mutates_args=())
def _backward(dy_NC: Tensor, x_NC: Tensor, weight_CW: Tensor, borders: Tensor, trained: bool) -> tuple[Tensor, Tensor]:
    """(dx, sums [W + 1, C] of the gradients of the weights and of the bias if they are trained, in fp32)."""
    dy, x, dx = with_adjacent_features(dy_NC), with_adjacent_features(x_NC), _dense(x_NC)
    rows, channels = x.shape
    grid = _grid(rows, channels)
    width = weight_CW.shape[1] + 1 if trained else 0
    parts = x.new_empty((width, grid[0], channels), dtype=torch.float32)
    if rows:
        programs.convolve_backward[grid](
            dy,
            x,
            weight_CW.contiguous(),
            borders,
            len(borders) - 1,
            dx,
            parts if trained else None,
            rows,
            channels,
            dy.stride(0),
            x.stride(0),
            **_options(weight_CW),
        )
    return dx, parts.sum(1)


@_backward.register_fake
def _(dy_NC: Tensor, x_NC: Tensor, weight_CW: Tensor, borders: Tensor, trained: bool) -> tuple[Tensor, Tensor]:
    width = weight_CW.shape[1] + 1 if trained else 0
    return _dense(x_NC), x_NC.new_empty((width, x_NC.shape[1]), dtype=torch.float32)


@compute.workspace(torch.ops.surogate_triton.causal_convolution_backward)
def _backward_bytes(dy_NC: Tensor, x_NC: Tensor, weight_CW: Tensor, borders: Tensor, trained: bool) -> int:
    """The sums of each program."""
    return 4 * (weight_CW.shape[1] + 1) * triton.cdiv(x_NC.shape[0], ROWS) * x_NC.shape[1] if trained else 0


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, borders: Tensor) -> Tensor:
        ctx.save_for_backward(x_NC, weight_CW, bias_C, borders)
        y_NC: Tensor = _forward(x_NC, weight_CW, bias_C, borders)
        return y_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NC: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, weight_CW, bias_C, borders = ctx.saved_tensors
        _, trains_weight, trains_bias, _ = ctx.needs_input_grad
        dx_NC, sums = _backward(dy_NC, x_NC, weight_CW, borders, trains_weight or trains_bias)
        dweight_CW = sums[:-1].t().to(weight_CW.dtype) if trains_weight else None
        return dx_NC, dweight_CW, sums[-1].to(bias_C.dtype) if trains_bias else None, None


def causal_convolution(
    x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, borders: Tensor
) -> tuple[Tensor, Tensor]:
    """`ops.causal_convolution` where no states are given or asked for."""
    with compute.region("att"):
        y_NC = _Convolution.apply(x_NC, weight_CW, bias_C, borders)
        return y_NC, x_NC.new_empty((0, weight_CW.shape[1] - 1, x_NC.shape[1]), dtype=torch.float32)


def takes(x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, borders: Tensor) -> bool:
    """Whether the op can be computed here."""
    return 1 < weight_CW.shape[1] <= WIDEST and x_NC.dtype in DTYPES and borders.shape[0] > 1


def kernel() -> bundles.Kernel:
    """The kernel."""
    return bundles.Kernel(
        op="causal_convolution",
        name="triton",
        function=causal_convolution,
        takes=takes,
        supports=lambda device, dtype: device.type == "cuda" and dtype in DTYPES,
        priority=10,
    )
