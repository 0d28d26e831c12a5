"""Helpers for rewrites of a joint graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch._guards import detect_fake_mode


def args(node: fx.Node) -> list[Any]:
    """The arguments of a node, of many types."""
    return list(node.args)


def named(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op's call by the names that its schema gives them."""
    target: Any = node.target
    return {argument.name: value for argument, value in zip(target._schema.arguments, node.args, strict=True)}


def items(node: fx.Node) -> dict[int, fx.Node]:
    """The results that are taken of an op with several, by number."""
    return {args(user)[1]: user for user in node.users}


def call(graph: fx.Graph, before: fx.Node, target: Any, values: Mapping[str, Any]) -> list[fx.Node]:
    """A call of an op before a node, its arguments taken by name from more of them; its results."""
    args = tuple(values[argument.name] for argument in target._schema.arguments)
    count = len(target._schema.returns)
    fakes: Any = fx.node.map_arg(args, lambda n: n.meta["val"])
    mode = detect_fake_mode([v for v in fakes if isinstance(v, Tensor)])
    assert mode is not None
    with mode:
        made = target(*fakes)
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
        node.meta = {**before.meta, "val": made}
        results = [graph.call_function(operator.getitem, (node, i)) for i in range(count)]
    for result, value in zip(results, made, strict=True):
        result.meta = {**before.meta, "val": value}
    return results


def replace(node: fx.Node, results: dict[int, fx.Node]) -> None:
    """Give who reads a result of the op another node instead, by number."""
    for number, item in items(node).items():
        item.replace_all_uses_with(results[number])
