"""Concatenations of a traced graph: parts that are adjacent in a buffer already, and columns that are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from surogate_core.dsl.values import EMPTY, VIEWS, base_op, is_view

WIDE = 2048
"""Numbers of a row from which on rows are joined by a kernel of their own."""


@torch.library.custom_op("surogate::joined", mutates_args=())
def joined(parts: Sequence[Tensor]) -> Tensor:
    """Columns next to each other, by a kernel that nothing is fused with."""
    return torch.cat(list(parts), 1)


@joined.register_fake
def _(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), 1)


def join_columns_apart(graph: fx.Graph) -> None:
    """Join several results in wide rows by kernels of their own. A kernel that is fused with what computes the parts
    evaluates each of them for every column, and reads and writes single elements, since a part may begin anywhere.

    One result with room behind it is left alone: the kernel that computes it writes it there.
    """
    for node in graph.nodes:
        if node.target != torch.ops.aten.cat.default or len(node.args) < 2:
            continue
        value, dim = node.meta["val"], node.args[1]
        parts = [part for part in node.args[0] if base_op(part) not in EMPTY]
        if dim % value.ndim == 1 and len(parts) > 1 and value[:1].numel() >= WIDE:
            node.target, node.args = torch.ops.surogate.joined.default, (node.args[0],)


def drop_joins(graph: fx.Graph) -> None:
    """Remove concatenations of tensors that are already adjacent in a buffer.

    The concatenation may end in an empty tensor: columns that the op which reads it writes into (`registry.in_place`).
    The buffer's own columns there are used, if nothing else reads them. A matrix may have more of the buffer behind its
    columns. A kernel that writes several results into one buffer is thus followed by one that reads them from one
    buffer, and neither knows the other.
    """
    made: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.target != torch.ops.aten.cat.default:
            continue
        parts = list(node.args[0])
        room = base_op(parts[-1]) in EMPTY
        if room:
            parts.pop()
        bases = {_buffer(part) for part in parts}
        base = bases.pop() if parts else None
        if bases or base is None:
            continue
        whole, joined = base.meta["val"], node.meta["val"]
        rows = joined.shape[0]
        if not (whole.is_contiguous() and joined.is_contiguous() and rows) or whole.numel() % rows:
            continue
        row = whole.numel() // rows
        if row != joined.stride(0) and (joined.ndim != 2 or row < joined.stride(0)):
            continue
        offset = 0
        for part in parts:
            value = part.meta["val"]
            fits = value.storage_offset() == offset and value.stride() == (row, *joined.stride()[1:])
            fits = fits and value.shape[0] == rows and value.shape[2:] == joined.shape[2:]
            if not fits:
                break
            offset += value.stride(1) * value.shape[1]
        else:
            if room and not _unread(base, row, offset, {*made, node}):
                continue
            view = _columns(graph, node, base, row)
            made.add(view)
            node.replace_all_uses_with(view)
            graph.erase_node(node)


def _columns(graph: fx.Graph, node: fx.Node, base: fx.Node, row: int) -> fx.Node:
    """The first columns of a buffer whose rows have `row` elements, in the shape and place of a node."""
    whole, joined = base.meta["val"], node.meta["val"]
    shape = list(joined.shape) if row == joined.stride(0) else [joined.shape[0], row]
    with graph.inserting_before(node):
        view = graph.call_function(torch.ops.aten.view.default, (base, shape))
        view.meta = {**node.meta, "val": whole.view(shape)}
        if row != joined.stride(0):
            view = graph.call_function(torch.ops.aten.slice.Tensor, (view, 1, 0, joined.shape[1]))
            view.meta = {**node.meta, "val": whole.view(shape)[:, : joined.shape[1]]}
    return view


def _unread(base: fx.Node, row: int, columns: int, but: set[fx.Node]) -> bool:
    """Whether nothing reads more of a value than the first `columns` of each `row` elements.

    The nodes `but` do not count, nor does what reads them. Nobody knows who else reads an input, so the answer is no.
    """
    if base.op != "call_function" or is_view(base):
        return False
    todo = [base]
    while todo:
        node = todo.pop()
        for user in node.users.keys() - but:
            if is_view(user):
                todo.append(user)
            elif not _within_columns(node.meta["val"], base.meta["val"], row, columns):
                return False
    return True


def _within_columns(view: Any, whole: Tensor, row: int, columns: int) -> bool:
    """Whether a view has no element behind the first `columns` of each `row` of the storage; no, if in doubt."""
    if not isinstance(view, Tensor) or view.dtype != whole.dtype:
        return False
    strides = zip(view.shape, view.stride(), strict=True)
    last = view.storage_offset() % row + sum((size - 1) * step for size, step in strides if step % row)
    return last < columns


def _buffer(node: fx.Node) -> fx.Node | None:
    """The node that this node is a view of, or None."""
    if base_op(node) not in VIEWS:
        return None
    while base_op(node) in VIEWS:
        node = node.all_input_nodes[0]
    return node
