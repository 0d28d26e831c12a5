"""The wires between the GPUs of a cluster, from the words of ``interconnect=`` and the table ``wires.yaml``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from surogate_core.errors import UserError

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
