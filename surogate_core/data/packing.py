"""Packing: whole documents into rows of fixed length, next-token labels inside each document.

A row is a list of spans (document, start, length); nothing is copied until a batch is made.

The packer is best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973) over a
window of documents: deterministic, one pass, memory bounded by the window.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from surogate_core.data.encoded import TruncationStrategy

PACKING_VERSION = 1
"""Incremented when the same documents pack differently; part of the packed rows' key."""

WINDOW = 1 << 16
"""Documents that are packed together."""


class DocumentSpan(NamedTuple):
    """A contiguous range of a document's tokens that is a document of its own in a row."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSettings:
    """The settings that determine rows."""

    sequence_len: int
    max_length: int | None = None
    """Tokens of the longest document; None is `sequence_len`."""
    truncation_strategy: TruncationStrategy = "delete"
    sample_packing: bool = True
    window: int = WINDOW

    @property
    def longest(self) -> int:
        """Tokens of the longest span."""
        return self.max_length or self.sequence_len

    def key(self) -> dict[str, Any]:
        """JSON-able content for a digest."""
        return {**asdict(self), "version": PACKING_VERSION}


@dataclass(slots=True, kw_only=True)
class PackStats:
    """The result of packing, counted in documents unless stated otherwise. A group counts as one."""

    documents: int = 0
    """Documents that were offered."""
    deleted: int = 0
    """Longer than a row and dropped (`truncation_strategy: delete`)."""
    truncated: int = 0
    """Longer than a row and cut at one end."""
    split: int = 0
    """Longer than a row and split into several."""
    unlabelled: int = 0
    """Spans dropped because cutting left them without a label."""
    rows: int = 0
    tokens: int = 0
    """Tokens in rows, padding not counted."""
    label_tokens: int = 0
    """Positions that carry loss."""
    max_documents: int = 0
    """Largest number of documents in a row; padding counts as one, and a group as all its documents."""


class DocumentLengths(Protocol):
    """The lengths and label counts of documents, as the packer reads them. A group is one document here."""

    @property
    def grouped(self) -> bool:
        """Whether a document is a group of several."""

    def parts(self, document: int) -> list[int]:
        """Tokens of each document of a group; of a document that is no group, its own."""

    def length(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each document."""

    def label_count(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each document that carry loss, the first token never counted."""

    def trained(self, document: int) -> NDArray[np.bool_]:
        """Whether each token of the document carries loss."""


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` grouped into bins whose sums are at most `capacity`.

    Longest first, equal lengths in their order, each into the fullest bin with enough space (the one opened last among
    equals). Every length must be in 1 … capacity. The memory needed depends only on the documents.
    """
    bins: list[list[int]] = []
    with_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # the keys of with_space, ascending: finds the tightest fit, and does not grow with capacity
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        at = bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            candidates = with_space[space]
            chosen = candidates.pop()
            if not candidates:
                del spaces[at], with_space[space]
            bins[chosen].append(index)
        else:
            space = capacity
            chosen = len(bins)
            bins.append([index])
        left = space - length
        if left in with_space:
            with_space[left].append(chosen)
        elif left:
            with_space[left] = [chosen]
            insort(spaces, left)
    return bins


def cut(length: int, longest: int, strategy: TruncationStrategy) -> list[tuple[int, int]]:
    """(start, length) of the parts, each of at most `longest` tokens, into which a document of `length` is split.

    The parts of a split document overlap by one token, which is context only in the later part:
    so every label of the document is learnt exactly once.
    """
    if length <= longest:
        return [(0, length)]
    match strategy:
        case "delete":
            return []
        case "left":
            return [(length - longest, longest)]
        case "right":
            return [(0, longest)]
        case "split":
            stride = longest - 1
            return [(start, min(longest, length - start)) for start in range(0, length - 1, stride)]


def cut_group(parts: Sequence[int], settings: PackSettings) -> list[tuple[int, int]] | None:
    """(start, length) of what is left of each document of a group, so that they fit into a row together; None if the
    group is dropped. `split` drops a longer group.
    """
    lengths = [min(length, settings.longest) for length in parts]
    if sum(lengths) > settings.sequence_len:
        lengths = [min(length, settings.sequence_len // len(parts)) for length in lengths]
    strategy = "delete" if settings.truncation_strategy == "split" else settings.truncation_strategy
    cuts = [cut(was, now, strategy) for was, now in zip(parts, lengths, strict=True)]
    return [found[0] for found in cuts] if all(len(found) == 1 for found in cuts) else None


def pack(
    documents: NDArray[np.int64], known: DocumentLengths, settings: PackSettings, stats: PackStats
) -> Iterator[list[list[DocumentSpan]]]:
    """Rows of the documents, window by window; updates `stats`."""
    for first in range(0, len(documents), settings.window):
        window = documents[first : first + settings.window]
        units = list(_units(window, known, settings, stats))
        if settings.sample_packing:
            filled = best_fit_decreasing([sum(s.length for s in unit) for unit in units], settings.sequence_len)
            rows = [[span for i in indices for span in units[i]] for indices in filled]
        else:
            rows = units
        stats.rows += len(rows)
        for row in rows:
            used = sum(span.length for span in row)
            stats.tokens += used
            stats.max_documents = max(stats.max_documents, len(row) + (used < settings.sequence_len))
        yield rows


def _units(
    documents: NDArray[np.int64], known: DocumentLengths, settings: PackSettings, stats: PackStats
) -> Iterable[list[DocumentSpan]]:
    """Spans that stay together: each alone, and the documents of a group."""
    grouped = known.grouped
    lengths = known.length(documents).tolist()
    label_counts = known.label_count(documents).tolist()
    for document, length, whole_labels in zip(documents.tolist(), lengths, label_counts, strict=True):
        stats.documents += 1
        if grouped and len(parts := known.parts(document)) > 1:
            yield from _group(document, parts, known, settings, stats)
            continue
        if length <= settings.longest:
            stats.label_tokens += whole_labels
            yield [DocumentSpan(document, 0, length)]
            continue
        match settings.truncation_strategy:
            case "delete":
                stats.deleted += 1
                continue
            case "split":
                stats.split += 1
            case _:
                stats.truncated += 1
        trained = known.trained(document)
        for start, part in cut(length, settings.longest, settings.truncation_strategy):
            labels = int(np.count_nonzero(trained[start + 1 : start + part]))
            if labels == 0:
                stats.unlabelled += 1
                continue
            stats.label_tokens += labels
            yield [DocumentSpan(document, start, part)]


def _group(
    document: int, parts: Sequence[int], known: DocumentLengths, settings: PackSettings, stats: PackStats
) -> Iterable[list[DocumentSpan]]:
    """The documents of a group if they fit into a row together, each with a label."""
    cuts = cut_group(parts, settings)
    if cuts is None:
        stats.deleted += 1
        return
    begins = [sum(parts[:number]) for number in range(len(parts))]
    spans = [DocumentSpan(document, at + start, size) for at, (start, size) in zip(begins, cuts, strict=True)]
    trained = known.trained(document)
    labels = [int(np.count_nonzero(trained[s.start + 1 : s.start + s.length])) for s in spans]
    stats.truncated += [size for _, size in cuts] != list(parts)
    if 0 in labels:
        stats.unlabelled += 1
        return
    stats.label_tokens += sum(labels)
    yield spans
