"""The cluster that the words of `surogate plan num_nodes=M gpus_per_node=N …` describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surogate_core.cli.wires import EXAMPLE, Link, parse
from surogate_core.errors import UserError

MOST = 1024
"""Most GPUs of a run: the largest value of the key `gpus`."""
FASTEST = 10**9
"""Tokens a second above which the speed of one GPU is a mistake."""
WORDS = ("num_nodes", "gpus_per_node", "interconnect", "tokens_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes with equal numbers of GPUs."""

    nodes: int
    per_node: int
    inside: Link | None = None
    """What connects the GPUs of a node; None if it is not known."""
    between: Link | None = None
    """What connects the nodes; None with one node, or if it is not known."""
    tokens_per_second: float | None = None
    """Measured speed of one GPU alone; None if it is not given."""
    copies: bool = True
    """Whether copy engines move what stays inside a node."""

    @property
    def ranks(self) -> int:
        """GPUs of the cluster, N."""
        return self.nodes * self.per_node

    @property
    def timed(self) -> bool:
        """Whether all wires are known."""
        return self.inside is not None and (self.nodes == 1 or self.between is not None)


def own_words(words: Sequence[str]) -> tuple[list[str], Cluster | None]:
    """(the other words, the cluster that the words describe, or None if none does); raises `UserError`.

    The other words say `gpus=` with the GPUs of the whole cluster.
    """
    found: dict[str, str] = {}
    others: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in WORDS:
            found[key] = value
        else:
            others.append(word)
    if not found:
        return others, None
    if "gpus_per_node" not in found:
        given = " ".join(f"{key}={value}" for key, value in found.items())
        raise UserError(f"{given}: the number of GPUs of a node is missing. Fix: add gpus_per_node=8")
    nodes = _count("num_nodes", found.get("num_nodes", "1"))
    per_node = _count("gpus_per_node", found["gpus_per_node"])
    cluster = Cluster(nodes=nodes, per_node=per_node)
    _check_number(cluster, others)
    inside, between = (None, None)
    if "interconnect" in found:
        inside, between = parse(found["interconnect"], nodes=nodes)
    speed = _speed(found["tokens_per_second"]) if "tokens_per_second" in found else None
    cluster = Cluster(nodes=nodes, per_node=per_node, inside=inside, between=between, tokens_per_second=speed)
    rest = [word for word in others if not word.startswith("gpus=")]
    return [*rest, f"gpus={cluster.ranks}"], cluster


def _count(key: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:6]) <= MOST or len(text) > 4:
        example = "num_nodes=125" if key == "num_nodes" else "gpus_per_node=8"
        raise UserError(f"{key}={text}: it is a number from 1 to {MOST}. Fix: {example}")
    return int(text)


def _check_number(cluster: Cluster, others: Sequence[str]) -> None:
    """The number of GPUs is one that a run may have, and no other word says another."""
    product = f"num_nodes={cluster.nodes} gpus_per_node={cluster.per_node}"
    if not 2 <= cluster.ranks <= MOST:
        number = "one GPU" if cluster.ranks == 1 else f"{cluster.ranks:,} GPUs"
        fix = "leave them, for one GPU" if cluster.ranks == 1 else f"num_nodes={MOST // cluster.per_node}"
        raise UserError(f"{product}: that is {number}, and a cluster has 2 to {MOST:,}. Fix: {fix}")
    for word in others:
        key, _, value = word.partition("=")
        if key == "gpus" and value != str(cluster.ranks):
            raise UserError(f"{word}: {product} is {cluster.ranks} GPUs. Fix: leave gpus")


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= FASTEST:
        message = "it is the measured tokens per second of one GPU, a number above 0"
        raise UserError(f"tokens_per_second={text}: {message}. Fix: tokens_per_second=12000")
    return value


HOW_TO_TIME = f"add {EXAMPLE}"
"""What to write where the wires are not known."""
HOW_TO_MEASURE = "add tokens_per_second=, which one GPU shows after a few steps"
"""What to write where the speed of one GPU is not known."""
