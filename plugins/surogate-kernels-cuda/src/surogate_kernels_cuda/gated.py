"""SwiGLU between adapted projections: its backward as part of theirs, by a rewrite of the joint graph.

The backward of down(silu(gate) · up) with LoRA reads a block's widest activations several times: for SwiGLU's own
gradients, for du and dB of gate and up, and for dA of down. One kernel does all of this from a single reading. It also
recomputes silu(gate) · up, so that it need not be kept. The kernel is CUDA C++: the same kernel in Triton took three
times as long, mostly to convert values to the layout of a product.

`surogate_native.gated` finds the places. Suffixes as in `surogate_core.kernels.panels`; F features, R rank of one
adapter.
"""

from __future__ import annotations

import torch
from surogate_native import adapters
from surogate_native.gated import SHARED, Ops, launch, parts_bytes, rewritten
from torch import Tensor, fx

from surogate_core.plugin import compute

LARGE = (9, 10)
"""Major compute capabilities with enough shared memory for two blocks of the large kernel at a time."""

ROWS = compute.Module(compute.Sources.of(__file__, "surogate_native"), "gated_backward", specific=True)


@compute.compiled_ahead
@torch.library.custom_op("surogate_cuda::down_backward", mutates_args=())
def down_backward(
    dy: Tensor, u_NR: Tensor, panel_QP: Tensor, inputs: int, outputs: int, rank: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of silu(gate) · up, du, dB) of the projection behind it; dA is left to `gated_backward`."""
    dy, du_NR, db, _ = adapters.gradients(dy, u_NR, panel_QP[:, inputs:], inputs, [outputs], rank, scale)
    outer = outputs + rank
    return torch.mm(dy[:, :outer], panel_QP[:outer, :inputs]), du_NR, db


@down_backward.register_fake
def _(
    dy: Tensor, u_NR: Tensor, panel_QP: Tensor, inputs: int, outputs: int, rank: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    n = dy.shape[0]
    return dy.new_empty(n, inputs), torch.empty_like(u_NR), dy.new_empty((outputs, rank), dtype=torch.float32)


@compute.compiled_ahead
@torch.library.custom_op("surogate_cuda::gated_backward", mutates_args=())
def gated_backward(
    dh_NF: Tensor,
    gate_NF: Tensor,
    up_NF: Tensor,
    du_NR: Tensor,
    x: Tensor,
    u_NR: Tensor,
    panel_QP: Tensor,
    inputs: int,
    rank: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """SwiGLU and the projections before it: (dx, dA and dB of both, dA of the projection behind, whose du is given)."""
    n, features = dh_NF.shape
    width, ranks = 2 * features, 2 * rank
    x_NI = x[:, :inputs] if x.stride(1) == 1 else x[:, :inputs].contiguous()
    dy = dh_NF.new_empty(n, width + adapters.ROOM)
    name = "gated_backward" if torch.cuda.get_device_capability(dy.device)[0] in LARGE else "gated_backward_small"
    du_parts, db_parts, da_parts = launch(
        ROWS, name, (dy, dy.stride(0)), dh_NF, gate_NF, up_NF, u_NR, panel_QP[:, inputs:], du_NR, SHARED[name]
    )
    outputs = [features, features]
    du, db, counters, da_down = adapters.summed(
        du_parts, db_parts, dy[:, width:], inputs, outputs, rank, scale, da_parts
    )
    da = adapters.down_gradient(x_NI, du, counters)
    dx = torch.mm(dy[:, : width + ranks], panel_QP[: width + ranks, :inputs])
    return dx, da, db, da_down


@gated_backward.register_fake
def _(
    dh_NF: Tensor,
    gate_NF: Tensor,
    up_NF: Tensor,
    du_NR: Tensor,
    x: Tensor,
    u_NR: Tensor,
    panel_QP: Tensor,
    inputs: int,
    rank: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, features = dh_NF.shape
    return (
        dh_NF.new_empty(n, inputs),
        dh_NF.new_empty((2 * rank, inputs), dtype=torch.float32),
        dh_NF.new_empty((2 * features, rank), dtype=torch.float32),
        dh_NF.new_empty((rank, features), dtype=torch.float32),
    )


@compute.workspace(torch.ops.surogate_cuda.down_backward)
def _down_bytes(dy: Tensor, u_NR: Tensor, panel_QP: Tensor, inputs: int, outputs: int, rank: int, scale: float) -> int:
    return adapters.gradients_bytes(dy, [outputs], rank, dy.shape[0] * inputs * dy.itemsize)


@compute.workspace(torch.ops.surogate_cuda.gated_backward)
def _gated_bytes(
    dh_NF: Tensor,
    gate_NF: Tensor,
    up_NF: Tensor,
    du_NR: Tensor,
    x: Tensor,
    u: Tensor,
    panel_QP: Tensor,
    inputs: int,
    rank: int,
    scale: float,
) -> int:
    n, features = dh_NF.shape
    return n * (2 * features + adapters.ROOM) * dh_NF.itemsize + parts_bytes(n, features, rank)


# --------------------------------------------------------------------------- the rewrite


def rewrite(joint: fx.Graph) -> None:
    """Take SwiGLU into the backward of the adapted projections around it."""
    own = torch.ops.surogate_cuda
    ops = Ops(
        backward="surogate_triton.adapted_linears_backward.default",
        down=own.down_backward.default,
        gated=own.gated_backward.default,
        widened=True,
        codes=False,
    )
    for _ in rewritten(joint, ops):
        pass
