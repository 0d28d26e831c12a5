"""Rows of CSV and TSV files: every cell is text, exactly as in the file."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import IO

from surogate_core.data.encoded import RowError
from surogate_core.data.rows.chunks import SourceRow
from surogate_core.data.rows.files import Opened, bom_length
from surogate_core.errors import UserError

_LONGEST_CELL = 1 << 28
"""Largest number of characters in a cell; a quote that is never closed must not read the whole file into memory."""
_MOST_BLANK = 1 << 21
"""Blank lines in a row; a compressed file can have any number of them."""


class _Lines:
    """The lines of a file with their ends, counted. Bytes that are not UTF-8 become halves of surrogate pairs."""

    def __init__(self, file: str, handle: IO[bytes]):
        self._file = file
        # With newline="" lines end at \n, \r\n and \r, and keep what they end with.
        self._text = io.TextIOWrapper(handle, encoding="utf-8-sig", errors="surrogateescape", newline="")
        self.number = 0
        """Lines that are read."""
        self.ended = False
        self.broken = False
        """Whether a line since the last `begin` is not UTF-8."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._text.readline(_LONGEST_CELL)
        if len(line) == _LONGEST_CELL:
            raise UserError(
                f"data set {self._file}:{self.number + 1}: the line is longer than {_LONGEST_CELL:,} characters."
            )
        if not line:
            self.ended = True
            raise StopIteration
        self.number += 1
        if not line.isascii():
            try:
                line.encode()
            except UnicodeEncodeError:
                self.broken = True
        return line

    def begin(self) -> int:
        """Number of the line that the next row begins at."""
        self.broken = False
        return self.number + 1


def csv_rows(file: str, opened: Opened, suffix: str) -> Iterator[SourceRow]:
    """The rows of a file, as mappings of column names to text; the place is the line that each begins at.

    `file` names it in messages and `opened` opens it anew. Raises `UserError` for another encoding, a header that names
    no columns or one twice, and a quote that is never closed.
    """
    csv.field_size_limit(_LONGEST_CELL)
    with opened() as handle:
        bom_length(file, handle.read(4))
    separator = "\t" if suffix == ".tsv" else ","
    with opened() as handle:
        lines = _Lines(file, handle)
        yield from _rows(file, separator, _records(file, lines, csv.reader(lines, delimiter=separator, strict=True)))


def _rows(file: str, separator: str, records: Iterable[tuple[int, list[str] | RowError]]) -> Iterator[SourceRow]:
    columns: list[str] | None = None
    for first, cells in records:
        if columns is None:
            if isinstance(cells, RowError):
                raise UserError(f"data set {file}:{first}: the header cannot be read: {cells}. Fix: correct it.")
            columns = _header(f"{file}:{first}", cells, separator)
        elif isinstance(cells, RowError):
            yield f"{file}:{first}", cells
        elif len(cells) != len(columns):
            if len(cells) == 1 and not cells[0].strip():  # blank
                continue
            counts = f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}, the header names {len(columns)} columns"
            yield f"{file}:{first}", RowError(f"the row has {counts}")
        else:
            yield f"{file}:{first}", dict(zip(columns, cells, strict=True))


def _records(file: str, lines: _Lines, reader: Iterable[list[str]]) -> Iterator[tuple[int, list[str] | RowError]]:
    """(first line, cells) of each row that is not blank. Every unreadable line is a bad row."""
    rows, blank = iter(reader), 0
    while True:
        first = lines.begin()
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if lines.ended or "limit" in str(error):
                if lines.number > first:
                    raise UserError(
                        f"data set {file}:{first}: a quote that is opened here is never closed, so the "
                        f"{lines.number - first:,} lines after it would be one cell. Fix: close the quote."
                    ) from error
                yield first, RowError("a quote is opened and never closed")
                continue
            for line in range(first, lines.number + 1):
                of = f" in the row of lines {first} to {lines.number}" if lines.number > first else ""
                yield line, RowError(f"not CSV{of}: text after a closing quote")
            continue
        if lines.broken:
            yield first, RowError("not UTF-8")
        elif cells:
            yield first, cells
        blank = 0 if cells else blank + 1
        if blank > _MOST_BLANK:
            raise UserError(
                f"data set {file}:{first}: more than {_MOST_BLANK:,} blank lines in a row. Fix: check that the file is "
                f"data."
            )


def _header(where: str, cells: list[str], separator: str) -> list[str]:
    """The columns' names. A column without a name, such as an index, gets the name that pandas gives it."""
    if len(cells) == 1:
        other = next((c for c in ",;\t|" if c != separator and c in cells[0]), None)
        if other is not None:
            wanted = "tabs" if separator == "\t" else "commas"
            raise UserError(
                f"data set {where}: the header is one column, {cells[0]!r}; columns are separated by {wanted} in a "
                f"{'.tsv' if separator == chr(9) else '.csv'} file. Fix: save it with {wanted}"
                + (", or name it .tsv." if other == "\t" else ".")
            )
    columns = [name or f"Unnamed: {index}" for index, name in enumerate(cells)]
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise UserError(
            f"data set {where}: the header names {', '.join(map(repr, twice))} more than once. Fix: rename a column."
        )
    return columns
