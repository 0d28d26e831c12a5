"""Tool parsers: the form in which models of a family call tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Tag = Callable[[str], str]
"""A tag of a call's form → what stands for it in a Lark rule: the special token of that text, or the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPart:
    """The next part of a completion."""

    kind: Literal["content", "name", "arguments", "end", "broken"]
    """``name`` begins a call, ``arguments`` continues it, ``end`` completes it. ``broken``: what looked like a call is
    none.
    """
    text: str
    """What it is of the completion, tags included. The texts of all parts are the completion."""
    value: str = ""
    """The name of a call, the next part of its arguments as JSON, or at the end its id, if the model wrote one."""


class ToolParser(Protocol):
    """Finds the calls in one completion while it grows."""

    def feed(self, text: str) -> Iterable[ToolPart]:
        """The parts that are certain with these next characters of the completion."""

    def close(self) -> Iterable[ToolPart]:
        """The other parts; the completion is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserSpec:
    """A form in which models call tools."""

    name: str
    """The value of `--tool-parser`."""
    fits: Callable[[str], bool]
    """Whether a chat template, given as its text, writes calls in this form."""
    open: Callable[[Sequence[Mapping[str, Any]]], ToolParser]
    """The offered functions, each with `name` and perhaps `parameters`, a JSON schema → the parser of a completion. The
    core compares names and arguments with the functions itself; what does not fit stays content.
    """
    grammar: Callable[[Sequence[Mapping[str, Any]], bool, Tag], str]
    """(functions, whether several calls may follow each other, `Tag`) → the rules of Lark, in the dialect of
    llguidance, for a completion that consists only of calls of these functions. The first rule is `start`.
    """
    tags: tuple[str, ...] = ()
    """Texts of the form that some tokenizers have as special tokens, which are not part of a text otherwise."""
    priority: int = 0
    """If several forms fit a template, the one with the largest priority is taken. Those of the core have 0."""
