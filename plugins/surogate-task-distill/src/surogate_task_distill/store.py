"""The teacher's most probable tokens for the trained tokens of packed rows, computed once and kept in the data cache.

An entry of the cache holds up to `SHARD` rows: `ids` ([M, K] int32), `logprobs` ([M, K] float16) and `offsets` (int64,
borders of the rows in M), so a killed run keeps the entries that are finished. M counts trained tokens, in their order
in the rows; a trained token is predicted by the position before it.

Shape suffixes: N tokens of a micro-batch, M trained tokens, K tokens of the teacher, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from surogate_core.plugin import IGNORE_LABEL, collate, encoding

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from surogate_core.plugin import PackedRows

    Tops = tuple[NDArray[np.int32], NDArray[np.float16]]

VERSION = 1
"""Raised when the entries' files change."""
SHARD = 256
"""Rows of an entry."""

Forward = Callable[[Any], Iterator[tuple[slice, "Tensor"]]]
"""A micro-batch → (positions of a part, their logits), such as `logits_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is kept of the teacher."""

    teacher: str
    """Digest of the teacher: its weights, its adapters, the dtype in which it computes."""
    top_k: int
    temperature: float
    vocabulary: int
    """Tokens of the student; the teacher's further ones, which pad its embedding, are left out."""

    def key(self, rows: PackedRows, indices: Sequence[int]) -> str:
        """The key of the entry of some rows."""
        mine = [self.teacher, self.top_k, self.temperature, self.vocabulary]
        return encoding.digest_of({"version": VERSION, "wanted": mine, "rows": rows.digest, "indices": [*indices]})


def top_of(logits_NV: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """(tokens, log-probabilities at the temperature) [N, K] of the most probable tokens."""
    logits_NV = logits_NV[:, : wanted.vocabulary].float() / wanted.temperature
    logprobs_NK, ids_NK = logits_NV.log_softmax(-1).topk(wanted.top_k, -1)
    return ids_NK, logprobs_NK


class TeacherStore:
    """The teacher's tokens of rows, by row."""

    def __init__(self, top_k: int):
        self._top_k = top_k
        self._places: dict[int, Tops] = {}

    def add(self, indices: Sequence[int], entry: encoding.CacheEntry) -> None:
        """Map the entry of some rows."""
        offsets = np.fromfile(entry.path / "offsets", np.int64)
        ids, logprobs = self._map(entry.path / "ids", np.int32), self._map(entry.path / "logprobs", np.float16)
        for index, begin, end in zip(indices, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            self._places[index] = ids[begin:end], logprobs[begin:end]

    def row(self, index: int) -> Tops:
        """(tokens, log-probabilities) [M, K] of the trained tokens of a row."""
        return self._places[index]

    def _map(self, path: Path, dtype: Any) -> NDArray[Any]:
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            return np.empty((0, self._top_k), dtype)
        return np.memmap(path, dtype=dtype, mode="r").reshape(-1, self._top_k)


def computed(
    rows: PackedRows,
    indices: Sequence[int],
    wanted: Wanted,
    cache: encoding.DataCache,
    *,
    load: Callable[[], Forward],
    rows_per_pass: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TeacherStore:
    """The store of some rows; what the cache lacks is computed.

    `load` gives the teacher's forward and is called at most once, only if an entry is missing. `progress` receives the
    rows that are done and their number.
    """
    store, forward = TeacherStore(wanted.top_k), cached(load)
    for start in range(0, len(indices), SHARD):
        part = [int(index) for index in indices[start : start + SHARD]]

        def build(directory: Path, start: int = start, part: list[int] = part) -> dict[str, Any]:
            return _write(
                directory,
                (_tops(rows, some, wanted, forward()) for some in _runs(part, rows_per_pass)),
                lambda done: progress(start + done, len(indices)),
            )

        store.add(part, cache.get_or_build(wanted.key(rows, part), build))
        progress(start + len(part), len(indices))
    return store


def _write(directory: Path, passes: Iterable[Iterable[Tops]], progress: Callable[[int], None]) -> dict[str, Any]:
    """Write an entry; `progress` receives the rows that are written."""
    offsets = [0]
    with (directory / "ids").open("wb") as ids, (directory / "logprobs").open("wb") as logprobs:
        for rows in passes:
            for ids_MK, logprobs_MK in rows:
                ids.write(ids_MK.tobytes())
                logprobs.write(logprobs_MK.tobytes())
                offsets.append(offsets[-1] + len(ids_MK))
            progress(len(offsets) - 1)
    np.array(offsets, np.int64).tofile(directory / "offsets")
    return {"tokens": offsets[-1]}


def _runs(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


def _tops(rows: PackedRows, indices: Sequence[int], wanted: Wanted, forward: Forward) -> Iterator[Tops]:
    """(tokens, log-probabilities) of each row, from one pass of the teacher."""
    batch = collate(rows, indices)
    trained_N = batch.labels != IGNORE_LABEL
    ids, logprobs = [], []
    for part, logits_NV in forward(batch):
        own_N = trained_N[part].to(logits_NV.device)
        ids_MK, logprobs_MK = top_of(logits_NV[own_N], wanted)
        ids.append(ids_MK.int().cpu())
        logprobs.append(logprobs_MK.half().cpu())
    counts = trained_N.view(len(indices), rows.sequence_len).sum(1).tolist()
    of_row = zip(torch.cat(ids).split(counts), torch.cat(logprobs).split(counts), strict=True)
    yield from ((ids_MK.numpy(), logprobs_MK.numpy()) for ids_MK, logprobs_MK in of_row)
