"""What a layer keeps of values that are parts of others: a part that is kept holds the memory of the whole.

A forward graph returns the results of its function and then what its backward receives; `count` is the number of the
first. The two graphs have their names apart: what the one returns the other is given by its name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from surogate_core.dsl.values import is_view, nbytes, root_of


def wholes(kept: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For the kept nodes that are parts of a value whose parts are all kept, or of an input: that value or input."""
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in kept:
        parts.setdefault(root_of(node), []).append(node)
    found: dict[fx.Node, fx.Node] = {}
    for base, members in parts.items():
        if base.op == "placeholder":
            found |= {member: base for member in members if member is not base}
            continue
        whole = base.op == "call_function" and isinstance(base.meta["val"], Tensor) and base not in kept
        if whole and sum(_own_bytes(n) for n in members) >= nbytes(base):
            found |= dict.fromkeys(members, base)
    return found


def keep_whole(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
    """Where all parts of a value are kept, keep the value: a part keeps all its memory, and cannot be moved alone.

    Nothing is kept of an input, which the backward receives anyway, and which may have moved by then.
    """
    (output,) = (n for n in forward.graph.nodes if n.op == "output")
    results, returned = output.args[0][:count], output.args[0][count:]
    whole = wholes(returned)
    if not whole:
        return
    given = {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
    first = next(n for n in backward.graph.nodes if n.op != "placeholder")
    copies: dict[fx.Node, fx.Node] = {}
    for number, base in enumerate(dict.fromkeys(whole.values())):
        if base.op == "placeholder" and base.name in given:
            copies[base] = given[base.name]
            continue
        member = next(n for n in returned if whole.get(n) is base)
        with backward.graph.inserting_before(given[member.name]):
            if base.op == "placeholder":
                copies[base] = backward.graph.placeholder(base.name)
                copies[base].meta = dict(base.meta)
                assert base.name == copies[base].name, f"{base.name} and {copies[base].name}"
                continue
            copies[base] = backward.graph.placeholder(f"whole_{number}")
        copies[base].meta = dict(base.meta)
        # The graphs have their names apart, and what the one returns the other is given by its name.
        base._rename(f"whole_{number}")
        assert base.name == copies[base].name, f"{base.name} and {copies[base].name}"
    for member in whole:
        with backward.graph.inserting_before(first):
            _copy_views(backward.graph, member, copies)
        given[member.name].replace_all_uses_with(copies[member])
        backward.graph.erase_node(given[member.name])
    output.args = ([*results, *dict.fromkeys(whole.get(n, n) for n in returned)],)
    for module in (forward, backward):
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()


def _own_bytes(node: fx.Node) -> int:
    """Bytes of a tensor's elements, wherever it is."""
    value: Tensor = node.meta["val"]
    return value.numel() * value.element_size()


def _copy_views(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
    """Copy a view and what it is made of, as far as that is not in `copies` yet."""
    if node not in copies:
        _copy_views(graph, node.all_input_nodes[0], copies)
        copies[node] = graph.node_copy(node, lambda n: copies[n])


def copy_parts(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
    """Where less than half of a value is kept, in parts, and nothing else needs the value, keep copies of the parts."""
    (output,) = (n for n in forward.graph.nodes if n.op == "output")
    results, returned = output.args[0][:count], output.args[0][count:]
    held = {root_of(n) for n in results if isinstance(n, fx.Node)} | {n for n in returned if not is_view(n)}
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in returned:
        if is_view(node) and root_of(node).op == "call_function" and root_of(node) not in held:
            parts.setdefault(root_of(node), []).append(node)
    given = {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
    copies: dict[fx.Node, fx.Node] = {}
    for base, members in parts.items():
        if 2 * sum(map(_own_bytes, members)) > nbytes(base):
            continue
        for member in members:
            with forward.graph.inserting_before(output):
                copy = forward.graph.call_function(
                    torch.ops.aten.clone.default, (member,), {"memory_format": torch.contiguous_format}
                )
            value, taken = member.meta["val"], given[member.name]
            copy.meta["val"] = value.new_empty(value.shape)
            taken.meta = {**taken.meta, "val": copy.meta["val"]}
            for node in (copy, taken):
                node._rename(f"part_{len(copies)}")
            taken.target = taken.name
            assert copy.name == taken.name, f"{copy.name} and {taken.name}"
            copies[member] = copy
    if copies:
        output.args = ([*results, *(copies.get(n, n) for n in returned)],)
        for module in (forward, backward):
            module.graph.lint()
            module.recompile()
