"""SwiGLU between adapted FP8 projections as part of them, forward and backward, by a rewrite of the joint graph.

As in `gated`. Here silu(gate) · up, and the gradients of gate and up, leave the kernels that make
them as FP8 codes: nobody reads them in bf16. Suffixes as there.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, fx

from surogate_core.kernels import scaled as formats
from surogate_core.kernels.native import Module
from surogate_kernels_triton import adapters, gated, scaled
from surogate_kernels_triton import graph_edits as edits
from surogate_kernels_triton.gated import Gated, move_users, users, viewed

CODES = Module(scaled.NATIVE, "gated_codes")
SHARED = 57_344
"""Bytes of shared memory of a block of `gated_codes`."""

aten = torch.ops.aten


@torch.library.custom_op("surogate_triton::scaled_gated", mutates_args=())
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
    figures = torch.empty((1, scaled.FIGURES), dtype=torch.float32, device=gate.device)
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
    figures = torch.empty((1, scaled.FIGURES), dtype=torch.float32, device=gate_NF.device)
    return gate_NF.new_empty(n, outputs), gate_NF.new_empty(n, rank), figures


@torch.library.custom_op("surogate_triton::scaled_down_backward", mutates_args=())
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
        dy.new_empty((1, scaled.FIGURES), dtype=torch.float32),
    )


@torch.library.custom_op("surogate_triton::scaled_gated_backward", mutates_args=())
def scaled_gated_backward(
    dh_NF: Tensor,
    gate_NF: Tensor,
    up_NF: Tensor,
    du_NR: Tensor,
    x_NI: Tensor,
    u: Tensor,
    panel: Tensor,
    weights: Sequence[Tensor],
    rows: Sequence[Tensor],
    rank: int,
    scale: float,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """SwiGLU and the projections before it: (dx, dA and dB of both, dA of the projection behind, figures)."""
    (n, features), inputs = dh_NF.shape, x_NI.shape[1]
    outputs = [features, features]
    dh, gate, up, x_NI = (t if t.stride(1) == 1 else t.contiguous() for t in (dh_NF, gate_NF, up_NF, x_NI))
    _, a_IR, b_OR = scaled.parts_of(panel, inputs, outputs, rank)
    figures = torch.empty((2, scaled.FIGURES), dtype=torch.float32, device=dh.device)
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
    chunks = features // gated.FEATURES
    parts = max(1, scaled.BLOCKS // chunks)
    share = -(-n // (parts * gated.STEP)) * gated.STEP
    parts = -(-n // share)
    du_parts = torch.empty((2 * chunks, n, rank), dtype=torch.float32, device=dh.device)
    db_parts = torch.empty((parts, 2 * features, rank), dtype=torch.float32, device=dh.device)
    da_parts = torch.empty((parts, rank, features), dtype=torch.float32, device=dh.device)
    CODES.launch(
        "gated_codes",
        (chunks, parts),
        gated.THREADS,
        *(value for t in (dh, gate, up) for value in (t, t.stride(0))),
        codes_C,
        figures,
        u,
        b_OR,
        b_OR.stride(0),
        du_NR,
        du_parts,
        db_parts,
        da_parts,
        *(np.int32(size) for size in (n, features, share)),
        shared=SHARED,
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
    u: Tensor,
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
        dh_NF.new_empty((2, scaled.FIGURES), dtype=torch.float32),
    )


# --------------------------------------------------------------------------- the rewrite


def _matched(backward: fx.Node) -> Gated | None:
    ops = torch.ops.surogate_triton
    dy, _, _, _, _, _, _, outputs, rank, _, _, p, _ = edits.args(backward)
    inner = viewed(dy)
    if p != 0 or rank != gated.RANK or len(outputs) != 2 or outputs[0] != outputs[1]:
        return None
    if inner.target != ops.swiglu_backward.default:
        return None
    dh, gate, up = edits.args(inner)
    if set(users(inner)) != {backward} or set(dh.users) != {inner} or dh.target is not operator.getitem:
        return None
    down_backward, number = edits.args(dh)
    if number != 0 or down_backward.target != ops.scaled_linears_backward.default:
        return None
    _, h, _, _, _, _, _, down_outputs, down_rank, _, _, down_p, _ = edits.args(down_backward)
    if down_p != 0 or len(down_outputs) != 1 or down_rank != rank:
        return None
    if h.target != aten.mul.Tensor or edits.args(h)[1] is not up:
        return None
    silu = edits.args(h)[0]
    if silu.target != aten.silu.default or edits.args(silu)[0] is not gate:
        return None
    return Gated(gate=gate, up=up, down_backward=down_backward, backward=backward)


def _apply(graph: fx.Graph, found: Gated) -> None:
    ops = torch.ops.surogate_triton
    node = found.down_backward
    dy, h, u, panel, weights, rows, _, _, rank, scale, margin, _, _ = edits.args(node)
    inputs = h.meta["val"].shape[1]
    arguments = (dy, u, panel, weights, rows, inputs, rank, scale, margin)
    dh, du, db, figures = edits.call(graph, node, ops.scaled_down_backward.default, arguments, 4)
    da_item = edits.items(node).get(1)
    kept = {1: da_item} if da_item is not None else {}
    edits.replace(node, {0: dh, 2: db, 3: figures, **kept})
    node = found.backward
    _, x, u_up, panel_up, weights_up, rows_up, _, _, rank_up, scale_up, margin_up, _, _ = edits.args(node)
    operands = (dh, found.gate, found.up, du, x, u_up, panel_up, weights_up, rows_up, rank_up, scale_up, margin_up)
    dx, da, db, da_down, figures = edits.call(graph, node, ops.scaled_gated_backward.default, operands, 5)
    edits.replace(node, {0: dx, 1: da, 2: db, 3: figures})
    if da_item is not None:
        move_users(graph, da_item, da_down)
        da_item.replace_all_uses_with(da_down)
    graph.eliminate_dead_code()
    if [user.target for user in h.users] == [ops.scaled_linears.default]:
        (node,) = h.users
        _, panel, weights, row, _, outputs, rank, margin, _, _ = edits.args(node)
        before = (found.gate, found.up, panel, weights, row, outputs[0], rank, margin)
        y, u, figures = edits.call(graph, node, ops.scaled_gated.default, before, 3)
        edits.replace(node, {0: y, 1: u, 2: figures})


def rewrite(joint: fx.Graph) -> None:
    """Take SwiGLU into the FP8 projections around it, wherever a joint graph has them."""
    target = torch.ops.surogate_triton.scaled_linears_backward.default
    for node in list(joint.nodes):
        if node.target == target and (found := _matched(node)) is not None:
            _apply(joint, found)
            # What was replaced is dead; the ops write nothing that others see.
            joint.eliminate_dead_code()
