"""Data files: which suffixes are read, how a file is opened, and which files of a directory belong to a split."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast

from surogate_core.errors import UserError

READERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}
"""Suffix of a data file → its reader."""

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
"""Suffix after the data file's own → how the file is compressed."""

SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in a file's name that name its split; a file without such a word belongs to `train`."""

_NO_DATA = re.compile(r"(readme|licen[cs]e|copying|notice|citation)(\.[a-z]+)?|.*\.md|dataset_infos?\.json", re.I)
"""Names of files that describe a data set; like hidden files, they are skipped without a note."""

_UTF8_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class FileKind(NamedTuple):
    """The kind of a data file, as its name states it."""

    suffix: str
    """Its own suffix in lower case, without a compression's suffix; a key of `READERS`."""
    compression: str | None

    @property
    def reader(self) -> str:
        """The reader of the format."""
        return READERS[self.suffix]


def kind_of(name: str) -> FileKind | str:
    """The kind of a file by its name, or the reason why it is not read."""
    path = Path(name)
    suffix = path.suffix.lower()
    compression = COMPRESSIONS.get(suffix)
    inner = Path(path.stem).suffix.lower() if compression else suffix
    if inner not in READERS:
        return f"files ending in {path.suffix or 'nothing'!r} cannot be read"
    if compression and READERS[inner] not in ("json", "csv"):
        return f"a compressed {inner} file cannot be read"
    return FileKind(inner, compression)


def readable_suffixes() -> str:
    """The suffixes for a message."""
    return f"{', '.join(sorted(READERS))}; JSON and CSV also with {', '.join(COMPRESSIONS)}"


Opened = Callable[[], AbstractContextManager[IO[bytes]]]
"""Opens the bytes of a file anew."""


@contextmanager
def readable(file: str) -> Iterator[None]:
    """Turn an error of the system or of a decompressor into a `UserError` that names the file."""
    import lzma
    import zlib

    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(
            f"data set {file}: cannot be decompressed: {error}. Fix: check that the file is whole."
        ) from error
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"data set {file}: cannot be read: {reason}.") from error


@contextmanager
def decompressed(opened: AbstractContextManager[IO[bytes]], compression: str | None) -> Iterator[IO[bytes]]:
    """The decompressed bytes of what `opened` opens. They may not be seekable; then use `forward` to skip bytes."""
    with ExitStack() as stack:
        handle = stack.enter_context(opened)
        match compression:
            case "gzip":
                import gzip

                yield cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=handle)))
            case "bz2":
                import bz2

                yield stack.enter_context(bz2.BZ2File(handle))
            case "xz":
                import lzma

                yield stack.enter_context(lzma.LZMAFile(handle))
            case "zstd":
                import io

                import pyarrow as pa

                raw = stack.enter_context(pa.CompressedInputStream(handle, "zstd"))
                yield stack.enter_context(io.BufferedReader(raw))
            case _:
                yield handle


def forward(handle: IO[bytes], count: int) -> None:
    """Skip `count` bytes of a file that was just opened."""
    if handle.seekable():
        handle.seek(count)
        return
    while count and (block := handle.read(min(count, 1 << 20))):
        count -= len(block)


def bom_length(file: str, head: bytes) -> int:
    """Length of the UTF-8 byte order mark at the beginning of a file. Raises `UserError` for the mark of another
    encoding.
    """
    for bom, name in _OTHER_BOMS.items():
        if head.startswith(bom):
            raise UserError(
                f"data set {file}: not UTF-8: it begins with the byte order mark of {name}. "
                f"Fix: save it as UTF-8, for example with `iconv -f {name} -t UTF-8`."
            )
    return len(_UTF8_BOM) if head.startswith(_UTF8_BOM) else 0


# ------------------------------------------------------------------------------ directories


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """The files of one directory."""

    splits: dict[str, list[Path]]
    """Split → its data files, sorted by path."""
    left_out: tuple[str, ...]
    """Each other file as ``name (reason)``, except hidden files and those that describe a data set."""


def list_directory(root: Path) -> Directory:
    """Sort the files below a directory into splits. Raises `UserError` when a part of it cannot be listed."""
    splits: dict[str, list[Path]] = {}
    left_out: list[str] = []
    for path in _files_below(root):
        relative = path.relative_to(root)
        if _NO_DATA.fullmatch(path.name):
            continue
        kind = kind_of(path.name)
        if path.is_dir():
            left_out.append(f"{relative} (a link to a directory, which is not followed)")
        elif isinstance(kind, str):
            left_out.append(f"{relative} ({kind})")
        elif reason := _why_not(path, kind):
            left_out.append(f"{relative} ({reason})")
        else:
            splits.setdefault(_split_of(relative, kind), []).append(path)
    return Directory(splits=splits, left_out=tuple(left_out))


def _files_below(root: Path) -> list[Path]:
    """All files below, without hidden names, sorted by path. Links are not followed."""

    def fail(error: OSError) -> None:
        raise UserError(f"data set {error.filename}: cannot be listed: {error.strerror}. Fix: correct its permissions.")

    found = []
    for directory, directories, names in os.walk(root, onerror=fail):
        directories[:] = [name for name in directories if not name.startswith((".", "_"))]
        links = [name for name in directories if (Path(directory) / name).is_symlink()]
        found += [Path(directory) / name for name in (*names, *links) if not name.startswith((".", "_"))]
    return sorted(found)


def _why_not(path: Path, kind: FileKind) -> str:
    """The reason why a file with the name of a data file is not read; empty if it is read."""
    if not path.is_file():
        return "a broken link" if path.is_symlink() else "neither a file nor a directory"
    if kind.compression and path.with_suffix("").is_file():
        return f"{path.stem} beside it is read instead"
    return ""


def _split_of(path: Path, kind: FileKind) -> str:
    stem = path.with_suffix("") if kind.compression is None else path.with_suffix("").with_suffix("")
    words = set(re.split(r"[^a-z]+", str(stem).lower()))
    return next((split for split, names in SPLIT_WORDS.items() if words & set(names)), "train")
