"""What rewrites of a joint graph are made of."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx
from torch._guards import detect_fake_mode


def args(node: fx.Node) -> list[Any]:
    """A node's arguments, whose types are too many to tell apart."""
    return list(node.args)


def items(node: fx.Node) -> dict[int, fx.Node]:
    """The results that are taken of an op with several, by number."""
    return {args(user)[1]: user for user in node.users}


def call(graph: fx.Graph, before: fx.Node, target: Any, args: tuple[Any, ...], count: int) -> list[fx.Node]:
    """A call of an op before a node, and its results."""
    fakes: Any = fx.node.map_arg(args, lambda n: n.meta["val"])
    mode = detect_fake_mode([v for v in fakes if isinstance(v, Tensor)])
    assert mode is not None
    with mode:
        values = target(*fakes)
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
        node.meta = {**before.meta, "val": values}
        results = [graph.call_function(operator.getitem, (node, i)) for i in range(count)]
    for result, value in zip(results, values, strict=True):
        result.meta = {**before.meta, "val": value}
    return results


def replace(node: fx.Node, results: dict[int, fx.Node]) -> None:
    """Give who reads a result of the op another node instead, by number."""
    for number, item in items(node).items():
        item.replace_all_uses_with(results[number])
