"""Tokenised documents and packed rows as memory-mapped files.

A document shard is four flat files: `tokens` and `labels` (int32, all documents end to end),
`offsets` (int64, D + 1 borders in tokens) and `label_counts` (int32 per document). Packed rows
are `pieces` ([P, 3] int64: document, start, length) and `row_offsets` (int64, R + 1 borders in
pieces). Nothing but what a batch needs is read into memory.

Shape suffixes: D documents, T tokens of a document, R rows, P pieces, L sequence_len.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate_core.data.cache import digest_of
from surogate_core.data.packing import PackSettings, PackStats, pack

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from surogate_core.data.cache import Cache
    from surogate_core.data.tokenize import Encoded

SHARD_VERSION = 1
"""Raised when the files' layout changes; part of every key."""


def _map(path: Path, dtype: DTypeLike) -> NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


# ------------------------------------------------------------------------------- documents


class DocumentWriter:
    """Appends documents to the files of a shard; used as a context manager."""

    def __init__(self, directory: Path):
        self._stack = ExitStack()
        self._files = {
            name: self._stack.enter_context((directory / name).open("wb"))
            for name in ("tokens", "labels", "offsets", "label_counts")
        }
        self._files["offsets"].write(np.zeros(1, np.int64).tobytes())
        self._content = hashlib.sha256()
        self.documents = 0
        self.tokens = 0
        self.label_tokens = 0

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def append(self, document: Encoded) -> None:
        """Add a document of at least one token."""
        tokens, labels = document.input_ids.tobytes(), document.labels.tobytes()
        label_tokens = document.label_tokens
        self.documents += 1
        self.tokens += len(document.input_ids)
        self.label_tokens += label_tokens
        self._files["tokens"].write(tokens)
        self._files["labels"].write(labels)
        self._files["offsets"].write(np.int64(self.tokens).tobytes())
        self._files["label_counts"].write(np.int32(label_tokens).tobytes())
        self._content.update(len(document.input_ids).to_bytes(8, "little"))
        self._content.update(tokens)
        self._content.update(labels)

    def content_digest(self) -> str:
        """SHA-256 of the documents so far, in order; the same however they came about."""
        return self._content.copy().hexdigest()


class DocumentShard:
    """The documents of one data set, memory-mapped."""

    def __init__(self, directory: Path):
        self._tokens = _map(directory / "tokens", np.int32)
        self._labels = _map(directory / "labels", np.int32)
        self.offsets: NDArray[np.int64] = _map(directory / "offsets", np.int64)
        self.label_counts: NDArray[np.int32] = _map(directory / "label_counts", np.int32)

    def __len__(self) -> int:
        return len(self.label_counts)

    def span(self, document: int, start: int, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(tokens, unshifted labels) of a part of a document, int32 views of the files."""
        first = int(self.offsets[document]) + start
        return self._tokens[first : first + length], self._labels[first : first + length]


class Documents:
    """The shards of several data sets as one sequence of documents."""

    def __init__(self, shards: Sequence[DocumentShard], digest: str):
        self._shards = tuple(shards)
        self._first = np.cumsum([0, *(len(shard) for shard in shards)], dtype=np.int64)
        self.digest = digest
        """Digest of the documents' content and order."""

    def __len__(self) -> int:
        return int(self._first[-1])

    def span(self, document: int, start: int, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(tokens, unshifted labels) of a part of a document, int32 views of the files."""
        shard = int(np.searchsorted(self._first, document, side="right")) - 1
        return self._shards[shard].span(document - int(self._first[shard]), start, length)

    def document(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(tokens, unshifted labels) of a whole document."""
        return self.span(document, 0, int(self.length(np.array([document], np.int64))[0]))

    def labels(self, document: int) -> NDArray[np.int32]:
        """The document's unshifted labels."""
        return self.document(document)[1]

    def length(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each document, int64."""
        return self._gather(documents, lambda shard, local: shard.offsets[local + 1] - shard.offsets[local])

    def label_count(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each document that carry loss, int64."""
        return self._gather(documents, lambda shard, local: shard.label_counts[local])

    def _gather(self, documents: NDArray[np.int64], read: Any) -> NDArray[np.int64]:
        found = np.empty(len(documents), np.int64)
        owner = np.searchsorted(self._first, documents, side="right") - 1
        for index, shard in enumerate(self._shards):
            mine = owner == index
            if mine.any():
                found[mine] = read(shard, documents[mine] - self._first[index])
        return found


# ------------------------------------------------------------------------------------ rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One packed row, before it is shifted: its documents end to end, no padding."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    lengths: tuple[int, ...]
    """Tokens of each document, in order."""


class PackedRows:
    """Packed rows: a memory-mapped plan over the documents."""

    def __init__(
        self,
        documents: Documents,
        directory: Path,
        facts: Mapping[str, Any],
        *,
        sequence_len: int,
        padding_id: int,
    ):
        self._documents = documents
        self._pieces = _map(directory / "pieces", np.int64).reshape(-1, 3)
        self._row_offsets = _map(directory / "row_offsets", np.int64)
        self.stats = PackStats(**facts["stats"])
        self.digest: str = facts["digest"]
        """Digest of the rows' content and order."""
        self.sequence_len = sequence_len
        self.padding_id = padding_id
        self.max_documents = self.stats.max_documents
        """Bound of the documents in a row, padding counted; the run's loaders share one."""

    def __len__(self) -> int:
        return len(self._row_offsets) - 1

    def row(self, index: int) -> Row:
        """Row `index`, read from the files."""
        pieces = self._pieces[self._row_offsets[index] : self._row_offsets[index + 1]].tolist()
        spans = [self._documents.span(*piece) for piece in pieces]
        return Row(
            input_ids=np.concatenate([ids for ids, _ in spans]),
            labels=np.concatenate([labels for _, labels in spans]),
            lengths=tuple(length for _, _, length in pieces),
        )

    @property
    def fill(self) -> float:
        """Share of the rows' positions that hold tokens."""
        return self.stats.tokens / max(1, len(self) * self.sequence_len)


def pack_documents(
    cache: Cache,
    documents: Documents,
    chosen: NDArray[np.int64] | None,
    chosen_key: Any,
    settings: PackSettings,
    *,
    padding_id: int,
) -> PackedRows:
    """Rows of the chosen documents (None: all), from the cache when they were packed before.

    `chosen_key` is a JSON-able value that stands for `chosen` in the key.
    """
    key = digest_of(
        {
            "shard_version": SHARD_VERSION,
            "documents": documents.digest,
            "chosen": chosen_key,
            "settings": settings.key(),
        }
    )

    def build(directory: Path) -> Mapping[str, Any]:
        stats = PackStats()
        selected = np.arange(len(documents), dtype=np.int64) if chosen is None else chosen
        pieces_written = 0
        with (directory / "pieces").open("wb") as pieces, (directory / "row_offsets").open("wb") as row_offsets:
            row_offsets.write(np.zeros(1, np.int64).tobytes())
            for rows in pack(selected, documents, settings, stats):
                flat = np.array([piece for row in rows for piece in row], np.int64)
                ends = pieces_written + np.cumsum([len(row) for row in rows], dtype=np.int64)
                pieces.write(flat.tobytes())
                row_offsets.write(ends.tobytes())
                pieces_written += len(flat)
        return {"stats": asdict(stats), "digest": key}

    entry = cache.get_or_build(key, build)
    return PackedRows(documents, entry.path, entry.facts, sequence_len=settings.sequence_len, padding_id=padding_id)
