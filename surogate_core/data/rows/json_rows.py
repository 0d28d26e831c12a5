"""Rows of JSON files: one object per line, consecutive objects, arrays of objects, or a mixture of these.

Every value of a file is a row, a bad row, or the reason why the file is refused; nothing is skipped silently.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from surogate_core.data.encoded import RowError
from surogate_core.data.rows.chunks import Chunk, Place, RowChunk, SourceRow, chunked
from surogate_core.data.rows.files import Opened, bom_length, forward
from surogate_core.errors import UserError
from surogate_core.files.foreign import TwiceError, unique

_HEAD = 1 << 12
_BLOCK = 1 << 20
_LARGEST_ELEMENT = 1 << 28
"""Largest number of characters in one value; a broken one must not read the whole file into memory."""
_LONGEST_LINE = 1 << 28
"""Bytes that a line of JSON may have, for the same reason."""
_MOST_BLANK = 1 << 27
"""Bytes without a value in a row, of blank lines or of a line that is too long; a compressed file can have any number
of them.
"""
_NEAR_END = 64
"""An error this many characters before the end may be due to the end."""

_GAP = re.compile(r"[ \t\r\n,\ufeff]*")
"""Characters allowed between two values; a byte order mark is one, because files may have been joined."""


_DECODER = json.JSONDecoder(object_pairs_hook=unique)
_ENDS = json.JSONDecoder(parse_int=lambda digits: 0)
"""Finds the end of a value that `_DECODER` refuses."""


class _BrokenError(Exception):
    """The text cannot be read beyond a line."""

    def __init__(self, line: int, reason: str):
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True, slots=True)
class LineChunk:
    """Lines of JSON as they are in the file."""

    file: str
    first: int
    """Number of the first line, from 1."""
    content: bytes
    after: Place
    done: int

    def rows(self) -> Iterator[SourceRow]:
        """The values on the lines that are not blank."""
        for number, line in enumerate(self.content.split(b"\n"), start=self.first):
            if not line:
                continue
            if (row := _object(line)) is not None:
                yield f"{self.file}:{number}", row
            elif line.strip():
                for other in _line_rows(line):
                    yield f"{self.file}:{number}", other


def json_chunks(file: str, opened: Opened, start: Place, *, done: int = 0, sized: bool = True) -> Iterator[Chunk]:
    """The rows of a JSON file from `start` on; `file` names it in messages and `opened` opens it anew.

    `done` is the number of bytes of the source before this file; `sized` says whether the bytes read count as bytes
    of the source. Raises `UserError` for a file in another encoding and where an array cannot be read on.
    """
    with opened() as handle:
        head = handle.read(_HEAD)
        bom = bom_length(file, head)
        head = head[bom:]
        blank = 0
        while not head.strip() and (block := handle.read(_BLOCK)):  # a file may begin with many blank lines
            head, blank = block, blank + len(head)
            _check_blank(file, blank)
        by_lines = not head.lstrip().startswith(b"[") and not _goes_on_over_lines(head, handle)
    with opened() as handle:
        if by_lines:
            at = max(bom, start[1])
            forward(handle, at)
            yield from _line_chunks(file, handle, (start[0], at, start[2]), done if sized else None)
        else:
            forward(handle, bom)
            yield from chunked(_value_rows(file, handle), start, done=done)


def _goes_on_over_lines(head: bytes, handle: IO[bytes]) -> bool:
    """Whether the first value, which begins in `head`, is whole and has line breaks inside."""
    content = head.lstrip()
    while True:
        text = content.decode("utf-8", "replace")
        try:
            return "\n" in text[: _DECODER.raw_decode(text)[1]]
        except json.JSONDecodeError as error:
            cut = error.pos > len(text) - _NEAR_END or error.msg.startswith("Unterminated string")
            if not cut or len(content) > _LARGEST_ELEMENT:
                return False
        except (ValueError, RecursionError):
            return False
        block = handle.read(max(_HEAD, len(content)))
        if not block:
            return False
        content += block


# ------------------------------------------------------------------------------------ lines


def _line_chunks(file: str, handle: IO[bytes], start: Place, done: int | None) -> Iterator[Chunk]:
    number, at, lines = start
    blank = 0
    while content := handle.read(_BLOCK):
        if not content.endswith(b"\n"):
            content += handle.readline(_LONGEST_LINE)
        at += len(content)
        blank = 0 if content.strip() else blank + len(content)
        _check_blank(file, blank)
        if blank:
            lines += content.count(b"\n") + (not content.endswith(b"\n"))
            continue
        broken = not content.endswith(b"\n") and len(content) >= _LONGEST_LINE
        content = content.removesuffix(b"\n")
        first, lines = lines + 1, lines + content.count(b"\n") + 1
        if not broken:
            yield LineChunk(file, first, content, (number, at, lines), 0 if done is None else done + at)
            continue
        whole, _, _ = content.rpartition(b"\n")
        more = 0
        while (rest := handle.readline(_BLOCK)) and not rest.endswith(b"\n"):
            at, more = at + len(rest), more + len(rest)
            _check_blank(file, more)
        at += len(rest)
        after = (number, at, lines)
        error = RowError(f"the line is longer than {_LONGEST_LINE:,} bytes")
        rows = [*LineChunk(file, first, whole, after, 0).rows(), (f"{file}:{lines}", error)]
        yield RowChunk(rows, after, 0 if done is None else done + at)


def _check_blank(file: str, count: int) -> None:
    """Raise `UserError` where a file goes on without a value."""
    if count > _MOST_BLANK:
        raise UserError(
            f"data set {file}: more than {_MOST_BLANK:,} bytes in a row have no value: blank lines, or a line that "
            f"does not end. Fix: check that the file is data."
        )


def _object(line: bytes) -> Mapping[str, Any] | None:
    """The object of a line that consists of one object, as most lines do; None for any other line."""
    try:
        value = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _line_rows(line: bytes) -> Iterator[Mapping[str, Any] | RowError]:
    """The values on a line: one, several, or an array of objects."""
    try:
        value = _DECODER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
    except UnicodeDecodeError as error:
        yield RowError(f"not UTF-8 at byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _several(line)
        else:
            yield RowError(f"not JSON at column {error.colno}: {error.msg}")
    except ValueError:  # a value that cannot be kept; others may follow it
        yield from _several(line)
    except RecursionError:
        yield RowError("nested too deeply")
    else:
        if isinstance(value, list) and value and all(isinstance(element, dict) for element in value):
            yield from value
        else:
            yield _as_row(value)


def _several(line: bytes) -> Iterator[Mapping[str, Any] | RowError]:
    content = line.decode(json.detect_encoding(line), "surrogatepass").encode("utf-8", "surrogatepass")
    after = ""
    try:
        for _, row in _values(io.BytesIO(content)):
            yield row
            after = " after the first value of the line"
    except _BrokenError as error:
        yield RowError(f"not JSON{after}: {error}")


# ----------------------------------------------------------------------------------- values


def _value_rows(file: str, handle: IO[bytes]) -> Iterator[SourceRow]:
    """The objects of a file and the elements of its arrays; the place is the line that each begins at."""
    try:
        for line, row in _values(handle):
            yield f"{file}:{line}", row
    except _BrokenError as error:
        raise UserError(
            f"data set {file}:{error.line}: {error}. "
            f"Fix: correct the file; with one object a line (.jsonl) only the broken line is lost."
        ) from error


def _values(handle: IO[bytes]) -> Iterator[tuple[int, Mapping[str, Any] | RowError]]:
    """(line, row) of each top-level value and of each element of a top-level array, read in blocks.

    Raises `_BrokenError`.
    """
    decode = codecs.getincrementaldecoder("utf-8")()
    text, at, line, ended, in_array, blank = "", 0, 1, False, False, 0

    def more() -> None:
        nonlocal text, at, ended
        block = handle.read(max(_BLOCK, len(text) - at))  # grows with the value, so that a big one stays linear
        ended = not block
        try:
            text, at = text[at:] + decode.decode(block, final=ended), 0
        except UnicodeDecodeError as error:
            raise _BrokenError(
                line + text.count("\n", at) + error.object.count(b"\n", 0, error.start), "not UTF-8"
            ) from None

    while True:
        gap = _GAP.match(text, at)
        assert gap is not None
        line += text.count("\n", at, gap.end())
        blank += gap.end() - at
        at = gap.end()
        if at == len(text) and not ended:
            if blank > _MOST_BLANK:
                raise _BrokenError(line, f"more than {_MOST_BLANK:,} blank characters in a row")
            more()
            continue
        blank = 0
        if at == len(text):
            if in_array:
                raise _BrokenError(line, "the JSON array is broken: it is not closed")
            return
        elif text[at] == ("]" if in_array else "["):
            in_array, at = not in_array, at + 1
        else:
            try:
                row, end = _decoded(text, at)
            except json.JSONDecodeError as error:
                if ended or len(text) - at >= _LARGEST_ELEMENT:
                    what = "the JSON array is broken" if in_array else "the text between JSON values is not JSON"
                    raise _BrokenError(line + text.count("\n", at, error.pos), f"{what}: {error.msg}") from error
                more()
                continue
            except RecursionError:
                raise _BrokenError(line, "a value is nested too deeply") from None
            if end == len(text) and not ended:  # a number may go on in the next block
                more()
                continue
            yield line, row
            line += text.count("\n", at, end)
            at = end


def _decoded(text: str, at: int) -> tuple[Mapping[str, Any] | RowError, int]:
    """The row at a place of the text, and where it ends. Raises `JSONDecodeError`, `RecursionError`."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        return _unreadable(error), _ENDS.raw_decode(text, at)[1]
    return _as_row(value), end


def _unreadable(error: ValueError) -> RowError:
    return RowError(str(error) if isinstance(error, TwiceError) else "a number has more digits than can be read")


def _as_row(value: Any) -> Mapping[str, Any] | RowError:
    if isinstance(value, dict):
        return value
    return RowError(f"a row must be a JSON object, this is {_kind(value)}")


def _kind(value: Any) -> str:
    match value:
        case list():
            return f"an array of {len(value)} values" if len(value) > 1 else "an array"
        case str():
            return "a string"
        case None:
            return "null"
        case bool():
            return "a boolean"
        case _:
            return "a number"
