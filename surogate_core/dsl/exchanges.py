"""The order of exchanges that are under way in a traced graph (`kernels.begun`), kept by whatever compiles it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from surogate_core.dsl.values import is_call, is_result
from surogate_core.kernels.begun import BEGINNINGS


def await_in_place(graph: fx.Graph) -> None:
    """Let the buffer of each exchange be its result, and begin each as soon as the one before it, if what it sends is
    there.

    A beginning names the exchange that began before it, and a wait the latest that has begun and not arrived and what
    was computed last: whoever reorders the graph keeps that order.
    """
    beginnings = [node for node in graph.nodes if node.target in BEGINNINGS]
    if not beginnings:
        return
    _begin_together(beginnings, graph)
    _forget_marks(graph)
    going: list[fx.Node] = []
    computed: fx.Node | None = None
    for node in list(graph.nodes):
        if node.target in BEGINNINGS:
            node.args = (*node.args, *going[-1:])
            going.append(node)
        elif node.target is torch.ops.surogate.arrived.default:
            begun, sent = node.args
            going.remove(begun)
            after = [*going[-1:], *([] if computed is None else [computed])]
            with graph.inserting_before(node):
                graph.call_function(torch.ops.surogate.await_arrival.default, (begun, sent, after))
            node.replace_all_uses_with(begun)
            graph.erase_node(node)
        elif is_result(node):
            computed = node


def _forget_marks(graph: fx.Graph) -> None:
    """Remove the marks of what is computed again, which the partitioner has read. torch would read them once more and
    compute such values just before a backward, which it takes for one row of nodes; here exchanges are in between.
    """
    for node in graph.nodes:
        node.meta.pop("recompute", None)


def _begin_together(beginnings: Sequence[fx.Node], graph: fx.Graph) -> None:
    """Move each beginning behind the one before it, if that is further ahead and computes nothing later."""
    for before, node in itertools.pairwise(beginnings):
        needed = _needed(node, before, {n: place for place, n in enumerate(graph.nodes)})
        if not any(map(is_call, needed)):
            for one in reversed([*needed, node]):
                before.append(one)


def _needed(node: fx.Node, before: fx.Node, place: Mapping[fx.Node, int]) -> list[fx.Node]:
    """What the node depends on behind another node, in order."""
    found: set[fx.Node] = set()
    todo, first = [node], place[before]
    while todo:
        for source in todo.pop().all_input_nodes:
            if place[source] > first and source not in found:
                found.add(source)
                todo.append(source)
    return sorted(found, key=place.__getitem__)
