"""The op `rms_norm` where its weight is trained: torch's forward, and a backward that reads everything once.

The sum over tokens that the weight's gradient is, and the one over features in dx, run across each
other, and Inductor makes two passes of them. The gradient of the residual stream, which the block
adds to dx, is added here by a rewrite of the joint graph. Suffixes: N tokens, D features, P parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from surogate_native import graph_edits as edits
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.plugin import bundles, compute
from surogate_kernels_triton import norm_programs as programs

PARTS = 528
"""Programs: four for each multiprocessor of a large Hopper; fixed, so that sums depend on shapes alone."""
WIDEST = 8192
"""Features that a program holds of a token."""

aten = torch.ops.aten


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::rms_norm_backward", mutates_args=())
def _backward(
    dy_ND: Tensor, x_ND: Tensor, weight_D: Tensor, inverse_N1: Tensor, other_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(dx, plus `other_ND` where there is one; parts [P, D] fp32 of the weight's gradient)."""
    n, features = x_ND.shape
    dy, x = (t if t.stride(1) == 1 else t.contiguous() for t in (dy_ND, x_ND))
    other = other_ND if other_ND is None or other_ND.stride(1) == 1 else other_ND.contiguous()
    dx_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format)
    parts_PD = x.new_empty((min(n, PARTS), features), dtype=torch.float32)
    programs.rms_norm_backward[(parts_PD.shape[0],)](
        dy,
        x,
        weight_D,
        inverse_N1,
        other,
        dx_ND,
        parts_PD,
        n,
        features,
        dy.stride(0),
        x.stride(0),
        0 if other is None else other.stride(0),
        ADD=other is not None,
        D=triton.next_power_of_2(features),
        num_warps=4 if features <= 2048 else 8,
    )
    return dx_ND, parts_PD


@_backward.register_fake
def _(
    dy_ND: Tensor, x_ND: Tensor, weight_D: Tensor, inverse_N1: Tensor, other_ND: Tensor | None
) -> tuple[Tensor, Tensor]:
    n, features = x_ND.shape
    parts_PD = x_ND.new_empty((min(n, PARTS), features), dtype=torch.float32)
    return torch.empty_like(x_ND, memory_format=torch.contiguous_format), parts_PD


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float, rounds_once: bool) -> Tensor:
        wide = x_ND.float()
        inverse_N1 = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_ND, weight_D, inverse_N1)
        if rounds_once:
            return (wide * inverse_N1 * weight_D.float()).to(x_ND.dtype)
        return weight_D * (wide * inverse_N1).to(x_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx_ND, parts_PD = _backward(dy_ND, *ctx.saved_tensors, None)
        return dx_ND, parts_PD.sum(0).to(ctx.saved_tensors[1].dtype), None, None


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor:
    """`ops.rms_norm`."""
    with compute.region("rmsnorm"):
        return _RMSNorm.apply(x_ND, weight_D, eps, rounds_once)


def takes(x: Tensor, weight_D: Tensor, eps: float, *, rounds_once: bool = False) -> bool:
    """Whether the weight is trained, of a norm over all features; without its gradient Inductor's code is as fast."""
    trained = torch.is_grad_enabled() and weight_D.requires_grad
    return trained and x.ndim == 2 and weight_D.dtype == x.dtype and x.shape[1] <= WIDEST


def kernel() -> bundles.Kernel:
    """The kernel."""
    return bundles.Kernel(
        op="rms_norm",
        name="triton",
        function=rms_norm,
        supports=lambda device, dtype: device.type == "cuda" and dtype in (torch.float16, torch.bfloat16),
        takes=takes,
        knows=frozenset({"rounds_once"}),
        priority=10,
    )


def _precedes(first: fx.Node, second: fx.Node) -> bool:
    return next(n for n in first.graph.nodes if n is first or n is second) is first


def rewrite(joint: fx.Graph) -> None:
    """Let the backward of a norm add what its dx is added to."""
    target = torch.ops.surogate_triton.rms_norm_backward.default
    for node in list(joint.nodes):
        if node.target != target or edits.args(node)[4] is not None:
            continue
        dx = edits.items(node).get(0)
        if dx is None or len(dx.users) != 1:
            continue
        (total,) = dx.users
        if total.target != aten.add.Tensor or total.kwargs or total.args[0] is total.args[1]:
            continue
        other = next(a for a in edits.args(total) if a is not dx)
        if not isinstance(other, fx.Node) or not _precedes(other, node):
            continue
        value, wanted = other.meta["val"], dx.meta["val"]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            continue
        results = edits.call(joint, node, target, {**edits.named(node), "other_ND": other})
        total.replace_all_uses_with(results[0])
        edits.replace(node, dict(enumerate(results)))
        joint.eliminate_dead_code()
