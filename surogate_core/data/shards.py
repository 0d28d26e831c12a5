"""Tokenised documents and packed rows as memory-mapped files.

A document shard is six flat files: `tokens` (int32, all documents end to end), `weights` (uint8
per token: the index of its loss weight among the shard's values, 0 where it is not trained),
`offsets` (int64, D + 1 borders in tokens), `inner` (int64, the borders in tokens between the documents of a group,
which is one document everywhere else), `label_counts` (int32 per document) and `digests` (uint64 per
document: equal documents have equal ones). Packed rows are `pieces` ([P, 3] int64:
document, start, length) and `row_offsets` (int64, R + 1 borders in pieces). Nothing but what a batch
needs is read into memory.

Shape suffixes: D documents, T tokens of a document, R rows, P pieces, L sequence_len.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate_core.batch import IGNORE_LABEL
from surogate_core.data.cache import digest_of
from surogate_core.data.encoding import check_weights
from surogate_core.data.packing import PackSettings, PackStats, pack

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from surogate_core.data.cache import DataCache
    from surogate_core.data.encoding import EncodedChunk

    Span = tuple[NDArray[np.int32], NDArray[np.float32]]

SHARD_VERSION = 2
"""Raised when the files' layout changes; part of every key."""
DOCUMENTS_VERSION = 4
"""Raised when document shards have further files; not part of the rows' digest, which checkpoints record."""


def _map(path: Path, dtype: DTypeLike) -> NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


# ------------------------------------------------------------------------------- documents


class DocumentWriter:
    """Appends documents to the files of a shard; used as a context manager.

    Another writer can continue from its `state`, saved after `flush`.
    """

    def __init__(self, directory: Path, state: Mapping[str, Any] | None = None):
        self._stack = ExitStack()
        self.documents: int = state["documents"] if state else 0
        self.tokens: int = state["tokens"] if state else 0
        self.label_tokens: int = state["label_tokens"] if state else 0
        self.inner: int = state["inner"] if state else 0
        self.weight_values: list[float] = list(state["weight_values"]) if state else [0.0, 1.0]
        """The loss weights that the indices in `weights` refer to."""
        self._content = bytes.fromhex(state["content"]) if state else b""
        sizes = {
            "tokens": 4 * self.tokens,
            "weights": self.tokens,
            "offsets": 8 * (self.documents + 1),
            "label_counts": 4 * self.documents,
            "digests": 8 * self.documents,
            "inner": 8 * self.inner,
        }
        self._files = {}
        for name, size in sizes.items():
            self._files[name] = file = self._stack.enter_context((directory / name).open("r+b" if state else "wb"))
            if state:  # anything written after the state was saved is written again
                file.truncate(size)
                file.seek(size)
        if not state:
            self._files["offsets"].write(np.zeros(1, np.int64).tobytes())

    def __enter__(self) -> DocumentWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def append(self, chunk: EncodedChunk) -> None:
        """Add the documents of a chunk. Raises `UserError` when the data set has too many different weights."""
        codes_T = chunk.weights_T
        if chunk.weight_values != self.weight_values[: len(chunk.weight_values)]:
            codes_T = self._codes(chunk.weight_values)[codes_T]
        self._files["tokens"].write(chunk.tokens_T.tobytes())
        self._files["weights"].write(codes_T.tobytes())
        self._files["offsets"].write((self.tokens + np.cumsum(chunk.lengths_D, dtype=np.int64)).tobytes())
        self._files["label_counts"].write(chunk.label_counts_D.tobytes())
        self._files["digests"].write(b"".join(digest[:8] for digest in chunk.digests))
        self._files["inner"].write((self.tokens + chunk.inner_G).tobytes())
        self.inner += len(chunk.inner_G)
        self.documents += len(chunk.lengths_D)
        self.tokens += len(chunk.tokens_T)
        self.label_tokens += int(chunk.label_counts_D.sum())
        for digest in chunk.digests:
            self._content = hashlib.sha256(self._content + digest).digest()

    def _codes(self, values: list[float]) -> NDArray[np.uint8]:
        self.weight_values += [value for value in values if value not in self.weight_values]
        check_weights(self.weight_values)
        return np.array([self.weight_values.index(value) for value in values], np.uint8)

    def flush(self) -> None:
        """Sync the documents so far to disk, so that they survive a crash."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def state(self) -> dict[str, Any]:
        """The writer's position, as JSON values."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
            "inner": self.inner,
            "weight_values": self.weight_values,
            "content": self._content.hex(),
        }

    def content_digest(self) -> str:
        """Digest of the documents so far, in order; the same however they were chunked."""
        return self._content.hex()


class DocumentShard:
    """The documents of one data set, memory-mapped."""

    def __init__(self, directory: Path, weight_values: Sequence[float] = (0.0, 1.0)):
        self._tokens = _map(directory / "tokens", np.int32)
        self._codes = _map(directory / "weights", np.uint8)
        self._values = np.array(weight_values, np.float32)
        self.offsets: NDArray[np.int64] = _map(directory / "offsets", np.int64)
        self.label_counts: NDArray[np.int32] = _map(directory / "label_counts", np.int32)
        self.digests: NDArray[np.uint64] = _map(directory / "digests", np.dtype("<u8"))
        self._inner: NDArray[np.int64] = _map(directory / "inner", np.int64)

    def __len__(self) -> int:
        return len(self.label_counts)

    @property
    def weighted(self) -> bool:
        """Whether a trained token counts other than 1 in the loss."""
        return len(self._values) > 2

    @property
    def grouped(self) -> bool:
        """Whether a document is a group of several."""
        return len(self._inner) > 0

    def parts(self, document: int) -> list[int]:
        """Tokens of each document of a group; of a document that is no group, its own."""
        borders = self.offsets[document : document + 2]
        first, last = np.searchsorted(self._inner, borders)
        parts: list[int] = np.diff(np.concatenate([borders[:1], self._inner[first:last], borders[1:]])).tolist()
        return parts

    def span(self, document: int, start: int, length: int) -> Span:
        """(tokens, loss weights) of a part of a document: a view of the file, and float32."""
        first = int(self.offsets[document]) + start
        return self._tokens[first : first + length], self._values[self._codes[first : first + length]]


class Documents:
    """The shards of several data sets as one sequence of documents."""

    def __init__(self, shards: Sequence[DocumentShard], digest: str):
        self._shards = tuple(shards)
        self._first = np.cumsum([0, *(len(shard) for shard in shards)], dtype=np.int64)
        self.digest = digest
        """Digest of the documents' content and order."""

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def weighted(self) -> bool:
        """Whether a trained token counts other than 1 in the loss."""
        return any(shard.weighted for shard in self._shards)

    @property
    def grouped(self) -> bool:
        """Whether a document is a group of several."""
        return any(shard.grouped for shard in self._shards)

    def span(self, document: int, start: int, length: int) -> Span:
        """(tokens, loss weights) of a part of a document."""
        shard, local = self._place(document)
        return shard.span(local, start, length)

    def parts(self, document: int) -> list[int]:
        """Tokens of each document of a group; of a document that is no group, its own."""
        shard, local = self._place(document)
        return shard.parts(local)

    def _place(self, document: int) -> tuple[DocumentShard, int]:
        shard = int(np.searchsorted(self._first, document, side="right")) - 1
        return self._shards[shard], document - int(self._first[shard])

    def digests(self) -> NDArray[np.uint64]:
        """Digest of each document's tokens, labels and weights, uint64 [D]; a copy in memory."""
        return np.concatenate([shard.digests for shard in self._shards])

    def trained(self, document: int) -> NDArray[np.bool_]:
        """Whether each token of the document carries loss."""
        return self.span(document, 0, int(self.length(np.array([document], np.int64))[0]))[1] > 0

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
    weights: NDArray[np.float32]
    """Loss weight of each token, 0 if it is not trained; float32."""
    lengths: tuple[int, ...]
    """Tokens of each document, in order."""

    @property
    def labels(self) -> NDArray[np.int32]:
        """The tokens that carry loss, `IGNORE_LABEL` elsewhere; unshifted."""
        return np.where(self.weights > 0, self.input_ids, np.int32(IGNORE_LABEL))


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
        """Largest number of documents in a row, padding included; all loaders of the run share it."""
        self.weighted = documents.weighted
        """Whether micro-batches carry loss weights; the run's loaders agree on it."""

    def __len__(self) -> int:
        return len(self._row_offsets) - 1

    def row(self, index: int) -> Row:
        """Row `index`, read from the files."""
        pieces = self._pieces[self._row_offsets[index] : self._row_offsets[index + 1]].tolist()
        spans = [self._documents.span(*piece) for piece in pieces]
        return Row(
            input_ids=np.concatenate([ids for ids, _ in spans]),
            weights=np.concatenate([weights for _, weights in spans]),
            lengths=tuple(length for _, _, length in pieces),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest document in the rows; 0 without rows."""
        return int(self._pieces[:, 2].max(initial=0))

    @property
    def fill(self) -> float:
        """Share of the rows' positions that hold tokens."""
        return self.stats.tokens / max(1, len(self) * self.sequence_len)


def pack_documents(
    cache: DataCache,
    documents: Documents,
    chosen: Sequence[NDArray[np.int64]] | None,
    chosen_key: Any,
    settings: PackSettings,
    *,
    padding_id: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    damaged: Callable[[str], None] = lambda text: None,
) -> PackedRows:
    """Rows of the chosen documents (None: all), from the cache when they were packed before.

    Each array of `chosen` is packed by itself, so that a row never has the same document twice. `chosen_key` is a
    JSON-able value that represents `chosen` in the key. `progress` receives the documents that are packed, and their
    total; `damaged` as in `DataCache.get`.
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
        passes = [np.arange(len(documents), dtype=np.int64)] if chosen is None else chosen
        total = sum(map(len, passes))
        pieces_written = 0
        with (directory / "pieces").open("wb") as pieces, (directory / "row_offsets").open("wb") as row_offsets:
            row_offsets.write(np.zeros(1, np.int64).tobytes())
            for rows in chain.from_iterable(pack(part, documents, settings, stats) for part in passes):
                flat = np.array([piece for row in rows for piece in row], np.int64)
                ends = pieces_written + np.cumsum([len(row) for row in rows], dtype=np.int64)
                pieces.write(flat.tobytes())
                row_offsets.write(ends.tobytes())
                pieces_written += len(flat)
                progress(stats.documents, total)
        return {"stats": asdict(stats), "digest": key}

    entry = cache.get_or_build(key, build, damaged=damaged)
    return PackedRows(documents, entry.path, entry.facts, sequence_len=settings.sequence_len, padding_id=padding_id)
