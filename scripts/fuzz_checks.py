"""The checks of fuzz_data.py: rows that plain readers count, the time of a case, leftovers in the cache."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import signal
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """The rows of a file as a plain reader counts them."""

    least: int
    """Rows that must be trained or reported."""
    most: int
    """Rows that may be trained."""


def total(parts: Iterable[Bounds]) -> Bounds:
    """The rows of several files."""
    counts = list(parts)
    return Bounds(sum(count.least for count in counts), sum(count.most for count in counts))


ANY = Bounds(0, 10**9)
HANG_SECONDS = 10


def count_rows(name: str, data: bytes) -> Bounds:
    """The rows of a file, by readers that share no line with ours."""
    stem, end = Path(name.lower()).stem, Path(name.lower()).suffix
    try:
        if end in (".gz", ".bz2", ".xz"):
            opener: Any = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}[end]
            return count_rows(stem, opener(data))
        if end in (".csv", ".tsv"):
            table = list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), dialect_of(end), strict=True))
            number = len([cells for cells in table if any(cell.strip() for cell in cells) or len(cells) > 1])
            return Bounds(max(0, number - 1), max(0, len(table) - 1))
        if end in (".parquet", ".arrow"):
            return count_table(end, data)
        return count_json(data)
    except (ValueError, RecursionError, OSError, EOFError, csv.Error, lzma.LZMAError, zlib.error):
        return ANY  # a plain reader gives up


def dialect_of(end: str) -> type[csv.Dialect]:
    """Commas or tabs."""
    return csv.excel_tab if end == ".tsv" else csv.excel


def count_table(end: str, data: bytes) -> Bounds:
    """The rows of Parquet or Arrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if end == ".parquet":
        number = pq.read_table(io.BytesIO(data)).num_rows
    elif data.startswith(b"ARROW1"):
        number = pa.ipc.open_file(io.BytesIO(data)).read_all().num_rows
    else:
        number = pa.ipc.open_stream(io.BytesIO(data)).read_all().num_rows
    return Bounds(number, number)


def count_json(data: bytes) -> Bounds:
    """The objects of a text of JSON: in arrays, one after another, one a line."""
    text = data.decode("utf-8-sig")
    try:
        at, counts = 0, []
        while at < len(text):
            if text[at] in " \t\r\n,\ufeff":
                at += 1
                continue
            value, at = json.JSONDecoder().raw_decode(text, at)
            if not isinstance(value, list):
                counts.append(Bounds(1, 1))
            elif all(isinstance(element, dict) for element in value):
                counts.append(Bounds(len(value), len(value)))
            else:
                counts.append(Bounds(min(1, len(value)), len(value)))
        return total(counts)
    except (ValueError, RecursionError):
        return Bounds(sum(is_object(line) for line in text.split("\n")), ANY.most)


def is_object(line: str) -> bool:
    """Whether a line is one JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def check_counts(files: Iterable[tuple[str, bytes]], samples: int | None, report: Any) -> None:
    """Raise `AssertionError` where a row of the files is neither trained nor reported, or counted twice."""
    (read,) = report.datasets
    assert read.rows == read.documents + read.bad_rows, "a row is neither a document nor a bad row"
    packed = report.train.documents + (report.eval.documents if report.eval else 0)
    assert packed == read.documents or report.eval is None, "a document is on neither side of the split"
    found = total(count_rows(name, data) for name, data in files)
    most = samples or ANY.most
    assert read.rows >= min(found.least, most), f"{min(found.least, most)} rows in the file, {read.rows} read"
    assert read.documents <= min(found.most, most), f"{found.most} rows in the file, {read.documents} trained"


class Hang(BaseException):
    """A case takes too long; no `except Exception` may swallow it."""


def _late(number: int, frame: FrameType | None) -> None:
    raise Hang(f"no answer in {HANG_SECONDS} s")


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise `Hang` inside a block that works or waits too long; for the main thread of a system with timers.

    Work is counted in processor time, so that other processes do not make a hang; waiting may take six times that.
    """
    limits = {
        signal.ITIMER_PROF: (signal.SIGPROF, HANG_SECONDS),
        signal.ITIMER_REAL: (signal.SIGALRM, 6 * HANG_SECONDS),
    }
    before = {number: signal.signal(number, _late) for number, _ in limits.values()}
    for timer, (_, seconds) in limits.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in limits:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def left_behind(cache_dir: Path) -> list[str]:
    """Entries of the cache that are neither whole, nor a lock, nor work that may be taken up again."""
    found = []
    for kind in cache_dir.iterdir() if cache_dir.is_dir() else ():
        for item in kind.iterdir():
            if item.suffix in (".lock", ".partial"):
                continue
            try:
                meta = json.loads((item / "meta.json").read_bytes())
                whole = all((item / name).stat().st_size == size for name, size in meta["files"].items())
            except (OSError, ValueError, KeyError):
                whole = False
            if not whole:
                found.append(f"{kind.name}/{item.name}")
    return found
