"""Rows of a source in chunks: cheap to read and to send to another process, which makes the rows of its chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from surogate_core.data.encoded import RowError

CHUNK_ROWS = 256
"""Rows of a chunk that is not made of bytes."""

SourceRow = tuple[str, Mapping[str, Any] | RowError]
"""Where a row is (``file:line``), and the row or what is wrong with it."""

Place = tuple[int, int, int]
"""A border of chunks: number of the file, bytes of it, and lines or rows of it."""
START: Place = (0, 0, 0)


class Chunk(Protocol):
    """Consecutive rows; can be pickled."""

    @property
    def after(self) -> Place:
        """The place that the next chunk begins at; `Source.chunks` takes it."""

    @property
    def done(self) -> int:
        """Bytes of the source up to the end of the chunk; 0 where they are not known."""

    def rows(self) -> Iterator[SourceRow]:
        """The rows."""


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows that are read already."""

    content: list[SourceRow]
    after: Place
    done: int = 0

    def rows(self) -> Iterator[SourceRow]:
        """The rows."""
        return iter(self.content)


def chunked(rows: Iterator[SourceRow], start: Place, *, skipped: int = 0, done: int = 0) -> Iterator[RowChunk]:
    """Rows of file `start[0]` as chunks from row `start[2]` on; `rows` begins at row `skipped`."""
    file, _, first = start
    rows = islice(rows, first - skipped, None)
    while content := list(islice(rows, CHUNK_ROWS)):
        first += len(content)
        yield RowChunk(content, (file, 0, first), done)
