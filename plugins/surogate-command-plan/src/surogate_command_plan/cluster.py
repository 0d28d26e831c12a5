"""The cluster that the words of `surogate plan num_nodes=M gpus_per_node=N …` describe, and its wires: the words of
``interconnect=`` and the table ``wires.yaml``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from surogate_core.plugin import UserError

FILE = Path(__file__).with_name("wires.yaml")
EXAMPLE = "interconnect=nvlink4,8xib400"
UNITS = {"GB/s": 1e9, "Gb/s": 1e9 / 8}
MOST_ADAPTERS = 64

Place = Literal["inside", "between"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A wire inside a node or between nodes."""

    title: str
    place: Place
    rate: float
    """Bytes a second in one direction: of a GPU inside a node, of a network adapter between nodes."""
    exchange: float = 1.0
    """Share of the rate that all-to-all exchanges reach."""
    gather: float = 1.0
    """Share of the rate that all-gathers reach."""
    step: float
    """Seconds of a step of a ring."""
    adapters: int = 1
    """Network adapters of a node, which its GPUs share; 1 inside a node."""
    shares: str
    """Where the shares of the rate are from."""
    source: str = ""
    """Where the rate is from."""

    def __str__(self) -> str:
        return f"{self.adapters} × {self.title}" if self.adapters > 1 else self.title

    def bandwidth(self, how: Literal["exchange", "gather"]) -> float:
        """Bytes a second that are reached in one direction: of a GPU inside a node, of a node between nodes."""
        return self.rate * self.adapters * (self.exchange if how == "exchange" else self.gather)


@cache
def wires() -> Mapping[str, Link]:
    """Every wire of the table by its short name."""
    return {name: _link(row) for name, row in yaml.safe_load(FILE.read_text(encoding="utf-8")).items()}


def _link(row: Mapping[str, Any]) -> Link:
    return Link(**{**row, "rate": row["rate"] * 1e9, "step": row["step"] * 1e-6})


def parse(text: str, *, nodes: int) -> tuple[Link, Link | None]:
    """(inside a node, between nodes) of ``nvlink4,8xib400``; raises `UserError`.

    With one node the second is None, and may be left out.
    """
    words = [word.strip() for word in text.strip().strip("[]").split(",")]
    if len(words) > 2 or not all(words):
        raise _wrong(text, "it names one wire inside a node and one between nodes, with a comma between them", EXAMPLE)
    inside = _wire(words[0], "inside", text)
    if nodes == 1:
        return inside, None
    if len(words) == 1:
        fix = f"interconnect={words[0]},8xib400 for nodes with 8 adapters of 400 Gb/s"
        raise _wrong(text, f"it names no wire between the {nodes} nodes", fix)
    return inside, _wire(words[1], "between", text)


def _wire(word: str, place: Place, text: str) -> Link:
    found = re.fullmatch(r"(?:(\d+)\s*[x×])?(.+)", word)
    assert found is not None, "the word is not empty"
    link = _given(found[2], place, text) or _named(found[2], place, text)
    if found[1] is None:
        return link
    adapters = int(found[1])
    if place == "inside":
        raise _wrong(text, "a count is for the network adapters of a node, which are between nodes", EXAMPLE)
    if not 1 <= adapters <= MOST_ADAPTERS:
        raise _wrong(text, f"a node has 1 to {MOST_ADAPTERS} network adapters, not {adapters}", EXAMPLE)
    return replace(link, adapters=adapters)


def _given(word: str, place: Place, text: str) -> Link | None:
    """A bandwidth that the user gives, taken as what is reached; None if the word begins with no number."""
    found = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*(\S*)", word)
    if found is None:
        return None
    if found[2] not in UNITS:
        raise _wrong(text, f"{word} has no unit, which is GB/s (bytes) or Gb/s (bits)", "a number with a unit: 45GB/s")
    try:
        rate = float(found[1]) * UNITS[found[2]]
    except ValueError:
        rate = 0.0
    if not 1e6 <= rate <= 1e14 or not math.isfinite(rate):
        raise _wrong(text, f"{word} is no bandwidth between 0.001 and 100000 GB/s", "a measured one: 45GB/s")
    alike = wires()["pcie5" if place == "inside" else "ib400"]
    return Link(title=word, place=place, rate=rate, step=alike.step, shares="given")


def _named(word: str, place: Place, text: str) -> Link:
    plain = re.sub(r"[^a-z0-9]", "", word.lower())
    fitting = {name: link for name, link in wires().items() if link.place == place}
    if plain in fitting:
        return fitting[plain]
    if plain in wires():
        where = "inside a node" if place == "inside" else "between nodes"
        raise _wrong(text, f"{word} does not connect GPUs {where}; the wire inside comes first", EXAMPLE)
    near = get_close_matches(plain, fitting, n=1)
    names = near or [*fitting, "or a measured bandwidth such as 45GB/s"]
    raise _wrong(text, f"there is no wire {word}", ", ".join(names))


def _wrong(text: str, message: str, fix: str) -> UserError:
    return UserError(f"interconnect={text}: {message}. Fix: {fix}")


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
