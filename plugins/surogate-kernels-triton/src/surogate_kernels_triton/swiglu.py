"""The op `swiglu`: torch's forward, and a backward that writes what a product of both gradients reads.

dgate and dup are adjacent, followed by unused columns, in the layout that the backward of `adapted_linears` reads; the
engine then removes its copy. Suffixes: N tokens, F features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.plugin import bundles, compute
from surogate_kernels_triton import swiglu_programs as programs

ROOM = 128
"""Columns behind the gradients."""


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::swiglu_backward", mutates_args=())
def _backward(dy_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    n, features = dy_NF.shape
    dy, gate, up = (t if t.stride(1) == 1 else t.contiguous() for t in (dy_NF, gate_NF, up_NF))
    out = dy.new_empty(n, 2 * features + ROOM)
    columns = 1024
    programs.swiglu_backward[n, triton.cdiv(features, columns)](
        dy,
        gate,
        up,
        out,
        features,
        dy.stride(0),
        gate.stride(0),
        up.stride(0),
        out.stride(0),
        C=columns,
        num_warps=4,
    )
    return out


@_backward.register_fake
def _(dy_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    return dy_NF.new_empty(dy_NF.shape[0], 2 * dy_NF.shape[1] + ROOM)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_NF, up_NF)
        return torch.nn.functional.silu(gate_NF) * up_NF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor, Tensor]:
        both = _backward(dy_NF, *ctx.saved_tensors)
        features = dy_NF.shape[1]
        return both[:, :features], both[:, features : 2 * features]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`ops.swiglu`."""
    with compute.region("swiglu"):
        return _SwiGLU.apply(gate, up)


def kernel() -> bundles.Kernel:
    """The kernel."""
    return bundles.Kernel(
        op="swiglu",
        name="triton",
        function=swiglu,
        supports=lambda device, dtype: device.type == "cuda" and dtype in (torch.float16, torch.bfloat16),
        priority=10,
    )
