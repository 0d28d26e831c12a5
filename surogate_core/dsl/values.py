"""Questions about the nodes of a traced graph: what they are, where their values are, how much arithmetic they take."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from surogate_core.kernels.packed_attention import attention_flops

VIEWS = frozenset(
    {
        torch.ops.aten.t,
        torch.ops.aten.permute,
        torch.ops.aten.transpose,
        torch.ops.aten.view,
        torch.ops.aten._unsafe_view,
        torch.ops.aten.reshape,
        torch.ops.aten.expand,
        torch.ops.aten.unsqueeze,
        torch.ops.aten.squeeze,
        torch.ops.aten.slice,
        torch.ops.aten.select,
        torch.ops.aten.split,
        torch.ops.aten.split_with_sizes,
        torch.ops.aten.alias,
        torch.ops.aten.detach,
    }
)

EMPTY = frozenset({torch.ops.aten.new_empty, torch.ops.aten.empty})

_CALLS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "embedding_dense_backward", "sort", "index_put"})
"""ATen ops that Inductor calls as kernels, like attention and the ops of packs; it fuses all others."""


def base_op(node: fx.Node) -> Any:
    """The op of a node whatever its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def name_of(node: fx.Node) -> str:
    """Name of an ATen op; empty for what is none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return ""
    return target.overloadpacket.__name__


def is_call(node: fx.Node) -> bool:
    """Whether it is a kernel of its own, which no compiler fuses with others."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    name = name_of(node)
    return not name or name in _CALLS or "attention" in name


def is_result(node: fx.Node) -> bool:
    """Whether it is a tensor that a separate kernel computes."""
    made_by = node.all_input_nodes[0] if node.target is operator.getitem else node
    return is_call(made_by) and isinstance(node.meta.get("val"), Tensor)


def is_view(node: fx.Node) -> bool:
    """Whether its value is in memory that another's is in; one of the parts of a split is such a value."""
    if node.target is operator.getitem:
        return base_op(node.all_input_nodes[0]) in VIEWS
    return base_op(node) in VIEWS


def root_of(node: fx.Node) -> fx.Node:
    """The node whose memory a value is in: itself, or what it is a view of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def storages(node: fx.Node) -> Iterator[tuple[int, int]]:
    """(identity, bytes) of each storage of a node's value; a view has its base's."""
    value: Any = node.meta.get("val")
    for tensor in value if isinstance(value, tuple | list) else (value,):
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            yield storage._cdata, int(storage.nbytes())


def nbytes(node: fx.Node) -> int:
    """Bytes of the storages of a node's value."""
    return sum(dict(storages(node)).values())


def flops(node: fx.Node) -> int:
    """FLOPs of a product or of attention, by torch's registry; 0 for what is not in it.

    Kernel packs put their ops there by ``torch.utils.flop_counter.register_flop_formula``.
    """
    formula = flop_registry.get(base_op(node))
    if formula is None or node.op != "call_function":
        return 0
    if base_op(node) == torch.ops.aten._flash_attention_forward:
        # torch's formula counts every document as the longest, and takes no groups of query heads (2.11).
        return attention_flops(node.all_input_nodes[0].meta["val"].shape)
    arguments, named = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*arguments, **named, out_val=node.meta["val"]))
