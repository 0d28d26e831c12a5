"""The op `swiglu`: torch's forward, and a backward that writes what a product of both gradients reads.

dgate and dup are adjacent, followed by unused columns, in the layout that the backward of `adapted_linears` reads; the
engine then removes its copy. Of rows of experts (`ends_E`) both have programs that stop at the last row: where ranks
share out experts, most places are those that no row takes. Suffixes: N tokens, F features.
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
ROWS = 8
"""Rows of a program that stops at the last row: few programs have none."""
COLUMNS = 1024
"""Most features of a program."""


def _adjacent(*tensors: Tensor) -> list[Tensor]:
    """The tensors with the features of a row next to each other."""
    return [t if t.stride(1) == 1 else t.contiguous() for t in tensors]


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::swiglu_of_experts", mutates_args=())
def _of_experts(gate_RF: Tensor, up_RF: Tensor, ends_E: Tensor) -> Tensor:
    """silu(gate) · up of the rows up to the last of `ends_E`; the others are undefined."""
    (rows, features), (gate, up) = gate_RF.shape, _adjacent(gate_RF, up_RF)
    out = gate.new_empty(rows, features)
    columns = min(COLUMNS, triton.next_power_of_2(features))
    programs.forward_of_rows[triton.cdiv(rows, ROWS), triton.cdiv(features, columns)](
        gate, up, out, ends_E[-1:], features, gate.stride(0), up.stride(0), ROWS=ROWS, C=columns, num_warps=4
    )
    return out


@_of_experts.register_fake
def _(gate_RF: Tensor, up_RF: Tensor, ends_E: Tensor) -> Tensor:
    return gate_RF.new_empty(*gate_RF.shape)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::swiglu_backward", mutates_args=())
def _backward(dy_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    (n, features), (dy, gate, up) = dy_NF.shape, _adjacent(dy_NF, gate_NF, up_NF)
    out = dy.new_empty(n, 2 * features + ROOM)
    strides = [t.stride(0) for t in (dy, gate, up, out)]
    programs.swiglu_backward[n, triton.cdiv(features, COLUMNS)](
        dy, gate, up, out, features, *strides, C=COLUMNS, num_warps=4
    )
    return out


@_backward.register_fake
def _(dy_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    return dy_NF.new_empty(dy_NF.shape[0], 2 * dy_NF.shape[1] + ROOM)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::swiglu_of_experts_backward", mutates_args=())
def _of_experts_backward(dy_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, ends_E: Tensor) -> Tensor:
    """`_backward` of the rows up to the last of `ends_E`; the others are undefined."""
    (rows, features), (dy, gate, up) = dy_RF.shape, _adjacent(dy_RF, gate_RF, up_RF)
    out = dy.new_empty(rows, 2 * features + ROOM)
    columns = min(COLUMNS, triton.next_power_of_2(features))
    strides = [t.stride(0) for t in (dy, gate, up, out)]
    programs.backward_of_rows[triton.cdiv(rows, ROWS), triton.cdiv(features, columns)](
        dy, gate, up, out, ends_E[-1:], features, *strides, ROWS=ROWS, C=columns, num_warps=4
    )
    return out


@_of_experts_backward.register_fake
def _(dy_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, ends_E: Tensor) -> Tensor:
    return dy_RF.new_empty(dy_RF.shape[0], 2 * dy_RF.shape[1] + ROOM)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor, ends_E: Tensor | None) -> Tensor:
        if ends_E is None:
            ctx.save_for_backward(gate_NF, up_NF)
            return torch.nn.functional.silu(gate_NF) * up_NF
        ctx.save_for_backward(gate_NF, up_NF, ends_E)
        return _of_experts(gate_NF, up_NF, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor | None, ...]:
        saved, features = ctx.saved_tensors, dy_NF.shape[1]
        both = _backward(dy_NF, *saved) if len(saved) == 2 else _of_experts_backward(dy_NF, *saved)
        return both[:, :features], both[:, features : 2 * features], None


def swiglu(gate: Tensor, up: Tensor, *, ends_E: Tensor | None = None) -> Tensor:
    """`ops.swiglu`."""
    with compute.region("swiglu"):
        return _SwiGLU.apply(gate, up, ends_E)


def kernel() -> bundles.Kernel:
    """The kernel."""
    return bundles.Kernel(
        op="swiglu",
        name="triton",
        function=swiglu,
        supports=lambda device, dtype: device.type == "cuda" and dtype in (torch.float16, torch.bfloat16),
        knows=frozenset({"ends_E"}),
        priority=10,
    )
