"""SwiGLU between adapted projections: where a joint graph has it, and how the kernels of ``gated.cuh`` are launched.

A match needs projections on panels, of rank 16, without dropout and in bf16; otherwise the graph stays as it is.
Suffixes as in `surogate_core.kernels.panels`; F features, R rank of one adapter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from surogate_core.kernels.building.native import Module
from surogate_native import graph_edits as edits

RANK = 16
"""LoRA rank. This and the constants below must match the source."""
FEATURES = 256
"""Features per thread block."""
STEP = 16
THREADS = 256
SHARED = {"gated_backward": 111_872, "gated_backward_small": 85_504}
"""Bytes of shared memory of the kernels whose copies run two steps ahead, and one step ahead."""
BLOCKS = 264
"""Thread blocks that run at a time on a large Hopper; fixed, so that the order of sums depends only on shapes."""

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.slice.Tensor, aten._unsafe_view.default, aten.reshape.default)


def launch(
    module: Module,
    name: str,
    out: Sequence[Tensor | int],
    dh_NF: Tensor,
    gate_NF: Tensor,
    up_NF: Tensor,
    u_NR: Tensor,
    b_OR: Tensor,
    du_NR: Tensor,
    shared: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a kernel of gated.cuh that writes to `out`; the parts of du, of dB and of the other dA."""
    n, features = dh_NF.shape
    rank = du_NR.shape[1]
    assert fits(n, features)
    dh, gate, up = (t if t.stride(1) == 1 else t.contiguous() for t in (dh_NF, gate_NF, up_NF))
    chunks = features // FEATURES
    parts = max(1, BLOCKS // chunks)
    rows = -(-n // (parts * STEP)) * STEP
    parts = -(-n // rows)
    du_parts = dh.new_empty((2 * chunks, n, rank), dtype=torch.float32)
    db_parts = dh.new_empty((parts, 2 * features, rank), dtype=torch.float32)
    da_parts = dh.new_empty((parts, rank, features), dtype=torch.float32)
    module.launch(
        name,
        (chunks, parts),
        THREADS,
        *out,
        *(value for t in (dh, gate, up) for value in (t, t.stride(0))),
        u_NR,
        b_OR,
        b_OR.stride(0),
        du_NR,
        du_parts,
        db_parts,
        da_parts,
        *(np.int32(size) for size in (n, features, rows)),
        shared=shared,
    )
    return du_parts, db_parts, da_parts


def fits(n: int, features: int, *, codes: bool = False) -> bool:
    """Whether the kernels' counts of 32 bits suffice: of the elements of du's parts, and of the bytes of FP8 codes."""
    return n * max(2 * features // FEATURES * RANK, 2 * features if codes else 0) < 2**32


def parts_bytes(n: int, features: int, rank: int) -> int:
    """Bytes of the partial sums of `gated_backward`, which live as long as it runs."""
    chunks = features // FEATURES
    share = -(-n // (max(1, BLOCKS // chunks) * STEP)) * STEP
    return 4 * rank * (2 * chunks * n + 3 * features * -(-n // share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The ops of the pattern in a graph and their replacements; arguments of the same name are the same."""

    backward: str
    """Name of the op for the backward of adapted projections, (dx, dA, dB, …); it may belong to another pack."""
    down: Any
    """Backward of the projection after SwiGLU: (gradient of its input, du, dB, …)."""
    gated: Any
    """Backward of SwiGLU and the projections before it: (dx, dA, dB, dA of the projection after it, …)."""
    widened: bool
    """Whether the projections' input has additional columns for u."""
    codes: bool
    """Whether the kernel writes FP8 codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """The nodes of one feed-forward part."""

    gate: fx.Node
    up: fx.Node
    h: fx.Node
    """silu(gate) · up."""
    down_backward: fx.Node
    """Backward of the projection after SwiGLU."""
    backward: fx.Node
    """Backward of the projections to gate and up."""


def viewed(node: Any) -> Any:
    """The node that a node is a view of, or itself."""
    while isinstance(node, fx.Node) and node.target in VIEWS:
        node = node.args[0]
    return node


def users(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a node, directly or through views."""
    for user in node.users:
        if user.target in VIEWS:
            yield from users(user)
        else:
            yield user


def matched(backward: fx.Node, ops: Ops) -> Gated | None:
    """The feed-forward part whose projections to gate and up this is the backward of, if it can be taken together."""
    own = edits.named(backward)
    outputs = own["outputs"]
    inner = viewed(own["dy"])
    if own["p"] != 0 or own["rank"] != RANK or len(outputs) != 2 or outputs[0] != outputs[1] or outputs[0] % FEATURES:
        return None
    if own["dy"].meta["val"].dtype != torch.bfloat16:
        return None
    if str(inner.target) != "surogate_triton.swiglu_backward.default":
        return None
    dh, gate, up = edits.args(inner)
    if not fits(*dh.meta["val"].shape, codes=ops.codes):
        return None
    if set(users(inner)) != {backward} or set(dh.users) != {inner} or dh.target is not operator.getitem:
        return None
    down_backward, number = edits.args(dh)
    if number != 0 or str(down_backward.target) != ops.backward:
        return None
    down = edits.named(down_backward)
    if down["p"] != 0 or len(down["outputs"]) != 1 or down["rank"] != RANK:
        return None
    h = edits.args(down_backward)[1]
    if ops.widened:
        if h.target != aten.cat.default:
            return None
        h = edits.args(h)[0][0]
    if h.target != aten.mul.Tensor or edits.args(h)[1] is not up:
        return None
    silu = edits.args(h)[0]
    if silu.target != aten.silu.default or edits.args(silu)[0] is not gate:
        return None
    return Gated(gate=gate, up=up, h=h, down_backward=down_backward, backward=backward)


def _apply(graph: fx.Graph, found: Gated, ops: Ops) -> None:
    node = found.down_backward
    sides = {"inputs": found.h.meta["val"].shape[1], "outputs": edits.named(node)["outputs"][0]}
    dh, du, db, *more = edits.call(graph, node, ops.down, {**edits.named(node), **sides})
    da_item = edits.items(node).get(1)
    kept = {1: da_item} if da_item is not None else {}
    edits.replace(node, {0: dh, 2: db, **kept, **dict(enumerate(more, start=3))})
    node = found.backward
    own = {"dh_NF": dh, "gate_NF": found.gate, "up_NF": found.up, "du_NR": du}
    dx, da, db, da_down, *more = edits.call(graph, node, ops.gated, {**edits.named(node), **own})
    edits.replace(node, {0: dx, 1: da, 2: db, **dict(enumerate(more, start=3))})
    if da_item is not None:
        move_users(graph, da_item, da_down)
        da_item.replace_all_uses_with(da_down)


def move_users(graph: fx.Graph, of: fx.Node, after: fx.Node) -> None:
    """Move the nodes that depend on `of` and precede `after` to the place after it."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    depend: set[fx.Node] = set()
    todo = [of]
    while todo:
        for user in todo.pop().users:
            if user not in depend and order[user] < order[after]:
                depend.add(user)
                todo.append(user)
    for node in sorted(depend, key=order.__getitem__, reverse=True):
        after.append(node)


def rewritten(joint: fx.Graph, ops: Ops) -> Iterator[Gated]:
    """Fuse SwiGLU into the backward of the projections around it, wherever a joint graph has them; yields the
    matches.
    """
    for node in list(joint.nodes):
        if str(node.target) == ops.backward and (found := matched(node, ops)) is not None:
            _apply(joint, found, ops)
            # The replaced nodes are dead code: the ops have no side effects.
            joint.eliminate_dead_code()
            yield found
