"""SwiGLU between adapted FP8 projections as part of them, forward and backward, by a rewrite of the joint graph.

Like the bf16 form in kernels-cuda, except that silu(gate) · up and the gradients of gate and up leave their kernels as
FP8 codes, because nothing reads them in bf16. Suffixes as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from surogate_native import adapters, gated
from surogate_native import graph_edits as edits
from surogate_native.figures import FIGURES
from torch import Tensor, fx
from torch.utils.flop_counter import register_flop_formula

from surogate_core.plugin import compute
from surogate_core.plugin import fp8 as formats
from surogate_kernels_hopper import scaled

CODES = compute.Module(scaled.SOURCES, "gated_codes", specific=True)


@compute.compiled_ahead
@torch.library.custom_op("surogate_hopper::scaled_gated", mutates_args=())
def scaled_gated(
    gate_NF: Tensor,
    up_NF: Tensor,
    panel: Tensor,
    weights: Sequence[Tensor],
    row: Tensor,
    outputs: int,
    rank: int,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, u, figures) of the projection of silu(gate) · up."""
    n, features = gate_NF.shape
    gate, up = (t if t.stride(1) == 1 else t.contiguous() for t in (gate_NF, up_NF))
    a_RI, _, b_OR = scaled.parts_of(panel, features, [outputs], rank)
    source = gate, gate.stride(0), up, up.stride(0)
    figures = torch.empty((1, FIGURES), dtype=torch.float32, device=gate.device)
    scaled.ENCODE.launch(
        "encode_gated_begin",
        (1,),
        1024,
        *source,
        np.int32(n),
        row,
        formats.E4M3_MAX,
        2.0**-margin,
        figures,
        np.int32(features),
    )
    codes_C = torch.empty(n * features, dtype=torch.uint8, device=gate.device)
    u_NR, y = gate.new_empty(n, rank), gate.new_empty(n, outputs)
    scaled.encode("encode_gated", source, a_RI, figures, codes_C, u_NR)
    scaled.product(codes_C, figures, weights, (u_NR, b_OR), y, features, [outputs], rank, gradient=False)
    return y, u_NR, figures


@scaled_gated.register_fake
def _(
    gate_NF: Tensor,
    up_NF: Tensor,
    panel: Tensor,
    weights: Sequence[Tensor],
    row: Tensor,
    outputs: int,
    rank: int,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    n = gate_NF.shape[0]
    figures = torch.empty((1, FIGURES), dtype=torch.float32, device=gate_NF.device)
    return gate_NF.new_empty(n, outputs), gate_NF.new_empty(n, rank), figures


@compute.compiled_ahead
@torch.library.custom_op("surogate_hopper::scaled_down_backward", mutates_args=())
def scaled_down_backward(
    dy: Tensor,
    u_NR: Tensor,
    panel: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    inputs: int,
    rank: int,
    scale: float,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(gradient of silu(gate) · up, du, dB, figures) of the projection behind it; dA is left to the other op."""
    outputs = [dy.shape[1]]
    if dy.stride(1) != 1:
        dy = dy.contiguous()
    _, a_IR, b_OR = scaled.parts_of(panel, inputs, outputs, rank)
    codes_C, figures, du_NR, db, _ = scaled.encode_gradient(dy, u_NR, b_OR, rows, inputs, outputs, rank, scale, margin)
    dh = dy.new_empty(dy.shape[0], inputs)
    scaled.product(codes_C, figures, weights, (du_NR, a_IR), dh, inputs, outputs, rank, gradient=True)
    return dh, du_NR, db, figures


@scaled_down_backward.register_fake
def _(
    dy: Tensor,
    u_NR: Tensor,
    panel: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    inputs: int,
    rank: int,
    scale: float,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, outputs = dy.shape
    return (
        dy.new_empty(n, inputs),
        torch.empty_like(u_NR),
        dy.new_empty((outputs, rank), dtype=torch.float32),
        dy.new_empty((1, FIGURES), dtype=torch.float32),
    )


@compute.compiled_ahead
@torch.library.custom_op("surogate_hopper::scaled_gated_backward", mutates_args=())
def scaled_gated_backward(
    dh_NF: Tensor,
    gate_NF: Tensor,
    up_NF: Tensor,
    du_NR: Tensor,
    x_NI: Tensor,
    u_NR: Tensor,
    panel: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    rank: int,
    scale: float,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """SwiGLU and the projections before it: (dx, dA and dB of both, dA of the projection behind, figures)."""
    (n, features), inputs = dh_NF.shape, x_NI.shape[1]
    assert gated.fits(n, features, codes=True)
    outputs = [features, features]
    dh, gate, up, x_NI = (t if t.stride(1) == 1 else t.contiguous() for t in (dh_NF, gate_NF, up_NF, x_NI))
    _, a_IR, b_OR = scaled.parts_of(panel, inputs, outputs, rank)
    figures = torch.empty((2, FIGURES), dtype=torch.float32, device=dh.device)
    CODES.launch(
        "gated_codes_begin",
        (2,),
        1024,
        *(value for t in (dh, gate, up) for value in (t, t.stride(0))),
        *rows,
        formats.E5M2_MAX,
        2.0**-margin,
        figures,
        np.int32(n),
        np.int32(features),
    )
    codes_C = torch.empty(n * 2 * features, dtype=torch.uint8, device=dh.device)
    du_parts, db_parts, da_parts = gated.launch(
        CODES, "gated_codes", (codes_C, figures), dh, gate, up, u_NR, b_OR, du_NR, gated.SHARED["gated_backward"]
    )
    du, db, counters, da_down = adapters.summed(du_parts, db_parts, None, inputs, outputs, rank, scale, da_parts)
    da = adapters.down_gradient(x_NI, du, counters)
    dx = x_NI.new_empty(n, inputs)
    scaled.product(codes_C, figures, weights, (du, a_IR), dx, inputs, outputs, rank, gradient=True)
    return dx, da, db, da_down, figures


@scaled_gated_backward.register_fake
def _(
    dh_NF: Tensor,
    gate_NF: Tensor,
    up_NF: Tensor,
    du_NR: Tensor,
    x_NI: Tensor,
    u_NR: Tensor,
    panel: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    rank: int,
    scale: float,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (n, features), inputs = dh_NF.shape, x_NI.shape[1]
    return (
        dh_NF.new_empty(n, inputs),
        dh_NF.new_empty((2 * rank, inputs), dtype=torch.float32),
        dh_NF.new_empty((2 * features, rank), dtype=torch.float32),
        dh_NF.new_empty((rank, features), dtype=torch.float32),
        dh_NF.new_empty((2, FIGURES), dtype=torch.float32),
    )


@register_flop_formula(torch.ops.surogate_hopper.scaled_gated)
def _flops(
    gate_shape: Sequence[int], up: Any, panel: Any, weights: Any, row: Any, outputs: int, *rest: Any, **named: Any
) -> int:
    n, features = gate_shape
    return 2 * n * features * outputs


@compute.workspace(torch.ops.surogate_hopper.scaled_gated)
def _codes_bytes(gate_NF: Tensor, *rest: Any) -> int:
    return gate_NF.numel()


@compute.workspace(torch.ops.surogate_hopper.scaled_down_backward)
def _down_bytes(
    dy: Tensor, u_NR: Tensor, panel: Tensor, weights: Sequence[Tensor], rows: Sequence[Tensor], inputs: int, *rest: Any
) -> int:
    return scaled.encoded_bytes(dy.shape[0], [dy.shape[1]], u_NR.shape[1], dy.shape[0] * inputs * dy.itemsize)


@compute.workspace(torch.ops.surogate_hopper.scaled_gated_backward)
def _gated_bytes(dh_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, du_NR: Tensor, *rest: Any) -> int:
    n, features = dh_NF.shape
    return 2 * n * features + gated.parts_bytes(n, features, du_NR.shape[1])


# --------------------------------------------------------------------------- the rewrite


def rewrite(joint: fx.Graph) -> None:
    """Take SwiGLU into the FP8 projections around it, wherever a joint graph has them."""
    found = torch.ops.surogate_hopper
    ops = gated.Ops(
        backward="surogate_hopper.scaled_linears_backward.default",
        down=found.scaled_down_backward.default,
        gated=found.scaled_gated_backward.default,
        widened=False,
        codes=True,
    )
    for part in gated.rewritten(joint, ops):
        if [user.target for user in part.h.users] == [found.scaled_linears.default]:
            (node,) = part.h.users
            named = edits.named(node)
            own = {"gate_NF": part.gate, "up_NF": part.up, "outputs": named["outputs"][0]}
            results = edits.call(joint, node, found.scaled_gated.default, {**named, **own})
            edits.replace(node, dict(enumerate(results)))
            joint.eliminate_dead_code()
