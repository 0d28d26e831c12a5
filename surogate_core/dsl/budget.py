"""Which of a block's residuals are kept where not all may be: those that are dearest to compute again.

The choice is made by counted arithmetic and bytes at the rates of a large GPU, so that it is the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import fx

from surogate_core.dsl.values import flops, is_call, is_view, nbytes

ARITHMETIC = 600e12
"""FLOP/s of a product, assumed: what an H200 comes to in a step in bf16, roughly."""
MEMORY = 3e12
"""Bytes a second that are read or written, assumed."""
CANDIDATES = 12
"""Residuals, the largest, of which every subset is tried; smaller ones are kept first."""

Again = Callable[[frozenset[fx.Node]], set[fx.Node]]
"""What is kept → the forward's nodes that the backward computes again."""


def chosen(kept: Sequence[fx.Node], budget: float, again: Again) -> list[fx.Node]:
    """The residuals of at most `budget` (0 to 1) of the bytes of all with which the least time goes into the others.

    None where not even the small ones fit.
    """
    sizes = {node: nbytes(node) for node in kept}
    largest = sorted(kept, key=lambda n: (-sizes[n], n.name))[:CANDIDATES]
    small = [node for node in kept if node not in largest]
    room = int(budget * sum(sizes.values())) - sum(sizes[n] for n in small)
    if room < 0:
        return []
    best = min(
        (frozenset(subset) for subset in _fitting(largest, sizes, room)),
        key=lambda s: (seconds(again(s | set(small))), sum(sizes[n] for n in s), sorted(n.name for n in s)),
    )
    return [node for node in kept if node in best or node in small]


def _fitting(nodes: Sequence[fx.Node], sizes: dict[fx.Node, int], room: int) -> Iterator[list[fx.Node]]:
    """The subsets within the room to which none of the others could be added."""
    for number in range(1 << len(nodes)):
        subset = [node for i, node in enumerate(nodes) if number >> i & 1]
        left = room - sum(sizes[n] for n in subset)
        others = (sizes[n] for i, n in enumerate(nodes) if not number >> i & 1)
        if left >= 0 and all(size > left for size in others):
            yield subset


def seconds(again: set[fx.Node]) -> float:
    """Estimated time of computing these: arithmetic of products, and traffic of what is in memory."""
    return sum(_seconds(node, again) for node in again)


def _seconds(node: fx.Node, again: set[fx.Node]) -> float:
    if node.op != "call_function" or is_view(node):
        return 0.0
    if is_call(node):
        traffic = nbytes(node) + sum(nbytes(n) for n in node.all_input_nodes)
        return max(flops(node) / ARITHMETIC, traffic / MEMORY)
    # Elementwise code is part of the kernel that reads it, if that is no call.
    written = any(user not in again or is_call(user) for user in node.users)
    return nbytes(node) / MEMORY if written else 0.0
