"""Which of a block's residuals are kept where not all may be: those that are dearest to compute again.

The choice is made by counted arithmetic and bytes at the rates of a large GPU, so that it is the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import fx

from surogate_core.dsl.values import flops, is_call, is_view, nbytes

ARITHMETIC = 600e12
"""FLOP/s of a product, assumed: roughly the rate of an H200 in a bf16 step."""
MEMORY = 3e12
"""Bytes per second that are read or written, assumed."""
CANDIDATES = 12
"""Values, the largest, of which every subset is tried; smaller residuals are kept first."""

Again = Callable[[frozenset[fx.Node]], set[fx.Node]]
"""The kept nodes → the forward's nodes that the backward computes again."""


def chosen(kept: Sequence[fx.Node], others: Sequence[fx.Node], budget: float, again: Again) -> list[fx.Node]:
    """The values to keep, at most `budget` (0 to 1) of the bytes of `kept`, so that recomputing the others takes the
    least time.

    `kept`: the residuals where all may be kept. `others`: values that may be kept instead, such as a product of which
    the backward wants two functions. Empty if not even the small ones of `kept` fit.
    """
    sizes = {node: nbytes(node) for node in (*kept, *others)}
    largest = sorted(sizes, key=lambda n: (-sizes[n], n.name))[:CANDIDATES]
    small = [node for node in kept if node not in largest]
    room = int(budget * sum(sizes[n] for n in kept)) - sum(sizes[n] for n in small)
    if room < 0:
        return []
    costs: dict[tuple[fx.Node, bool], float] = {}

    def rank(subset: Sequence[fx.Node]) -> tuple[float, int]:
        return seconds(again(frozenset((*subset, *small))), costs), sum(sizes[n] for n in subset)

    best = min(_fitting(largest, sizes, room), key=rank)
    return [*best, *small]


def _fitting(nodes: Sequence[fx.Node], sizes: dict[fx.Node, int], room: int) -> Iterator[list[fx.Node]]:
    """The subsets within the room."""
    for number in range(1 << len(nodes)):
        subset = [node for i, node in enumerate(nodes) if number >> i & 1]
        if sum(sizes[n] for n in subset) <= room:
            yield subset


def seconds(again: set[fx.Node], costs: dict[tuple[fx.Node, bool], float] | None = None) -> float:
    """Estimated time of computing these: arithmetic of products, and traffic of what is in memory.

    `costs`: those that are known, to which others are added.
    """
    known: dict[tuple[fx.Node, bool], float] = {} if costs is None else costs
    total = 0.0
    for node in again:
        if node.op != "call_function" or is_view(node):
            continue
        # Elementwise code is part of the kernel that reads it, if that is no call.
        written = any(user not in again or is_call(user) for user in node.users)
        key = node, written
        if key not in known:
            known[key] = _seconds(node, written=written)
        total += known[key]
    return total


def _seconds(node: fx.Node, *, written: bool) -> float:
    if is_call(node):
        traffic = nbytes(node) + sum(nbytes(n) for n in node.all_input_nodes)
        return max(flops(node) / ARITHMETIC, traffic / MEMORY)
    return nbytes(node) / MEMORY if written else 0.0
