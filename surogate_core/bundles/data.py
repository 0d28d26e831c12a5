"""Dataset formats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surogate_core.data.encoded import EncodeContext, Encoded, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """The type chosen for a data set from its sampled rows."""

    type: str
    """The `type` of the format that reads them."""
    fields: Mapping[str, Any]
    """Fields of that type, as an entry of `datasets` would have them."""
    reason: str
    """The evidence in the rows, shown to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFormat:
    """One `type` of data set: encodes a row as tokens and labels, or chooses another type that does."""

    name: str
    """The `type` of an entry of `datasets`."""
    options: type
    """Dataclass of the fields that a `datasets` entry of this type may have in addition to the common ones."""
    encode: Callable[[Mapping[str, Any], Any, EncodeContext], Encoded | Group] | None = None
    """(row, options, context) → tokens and labels, or a group of documents that share a packed row; raises `RowError`
    with the reason for a bad row.
    """
    choose: Callable[[Sequence[Mapping[str, Any]], Any], FormatChoice] | None = None
    """Instead of `encode`: (sampled rows, options) → the type that reads them; raises `RowError` when none does."""
    columns: Callable[[Any], Collection[str]] | None = None
    """Options → the fields of a row that `encode` reads; the run lists the fields that it does not read. None: not
    known. Like `encode`, it must be a function of a module, because it is sent to worker processes.
    """
    note: Callable[[Any, EncodeContext], str] | None = None
    """(options, context) → what the user should know before the run about how rows are read, such as a prompt that the
    format writes around them; empty if there is nothing.
    """
    trains_prompts: bool = False
    """Whether every token of a document is meant to be trained, so the run does not warn about it."""
    version: int = 1
    """Increment it when the same row encodes differently; part of the shard cache's digest."""
    tasks: tuple[str, ...] | None = None
    """Tasks that can train on it; None is all that train on documents."""
    examples: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = ()
    """(row, fields of an entry) that the format reads; the conformance kit uses them."""

    def __post_init__(self) -> None:
        """Raise `ValueError` unless exactly one of `encode` and `choose` is given."""
        if (self.encode is None) == (self.choose is None):
            raise ValueError(f"data set format {self.name!r} must have either `encode` or `choose`")
