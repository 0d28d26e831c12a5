"""Rows of a `datasets` entry, streamed: local files and directories, ``pkg://`` data, URLs, hub ids.

Rows come in chunks, which are cheap to read and to send to another process; the rows of a chunk
are made where they are needed. JSON is read by this module, so that a bad row is named by file
and line; other formats are streamed by the `datasets` library.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, Protocol

from annotated_types import Ge, Gt

from surogate_core.data.paths import is_hub_id, is_url, resolve_package_path
from surogate_core.data.tokenize import RowError
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
"""Suffix of a data file → what reads it."""

SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in the name of a directory's file that say which split it is; without one it is `train`."""

_BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20
_LARGEST_ELEMENT = 1 << 28
"""Characters that one element of a JSON array may have; a broken one must not draw the whole file into memory."""

_LONGEST_LINE = 1 << 28
"""Bytes that a line of JSON may have, for the same reason."""
_CHUNK_ROWS = 256
"""Rows of a chunk that is not made of bytes."""

SourceRow = tuple[str, Mapping[str, Any] | RowError]
"""Where a row is (``file:line``), and the row or what is wrong with it."""


class Chunk(Protocol):
    """Some rows in a row; can be pickled."""

    @property
    def after(self) -> tuple[int, int, int]:
        """The place that the next chunk begins at; `Source.chunks` takes it."""

    @property
    def done(self) -> int:
        """Bytes of the source up to the end of the chunk; 0 where they are not known."""

    def rows(self) -> Iterator[SourceRow]:
        """The rows."""


Place = tuple[int, int, int]
"""A border of chunks: number of the file, bytes of it, and lines or rows of it."""
START: Place = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows that are read already."""

    content: list[SourceRow]
    after: Place
    done: int = 0

    def rows(self) -> Iterator[SourceRow]:
        """The rows."""
        return iter(self.content)


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
        """The lines that are not blank, parsed."""
        for number, line in enumerate(self.content.split(b"\n"), start=self.first):
            if line.strip():
                yield f"{self.file}:{number}", _parsed(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """The fields of a `datasets` entry that say which rows it means."""

    path: str
    """File, directory, ``pkg://package/file``, URL or hub id."""
    subset: str | None = None
    """Configuration of a hub data set, or a subdirectory of a local one."""
    split: str = "train"
    """Split of a hub data set or of a directory; a single file has only one."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set; null is its main branch."""
    samples: Annotated[int, Ge(1)] | None = None
    """Take this many rows from the beginning; null takes all."""
    weight: Annotated[float, Gt(0)] = 1.0
    """How often an epoch takes its documents: 2 takes each twice, 0.5 a half of them, chosen by `train_seed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows that can be read any number of times."""

    name: str
    """Short name for progress and messages."""
    digest: str
    """SHA-256 of the content, or of what identifies it where the content is not at hand."""
    read: Callable[[Place], Iterator[Chunk]]
    """Reads chunks from a border on. Raises `UserError` when a file is broken."""
    size: int = 0
    """Bytes of all chunks; 0 where they are not known."""

    def chunks(self, start: Place = START) -> Iterator[Chunk]:
        """Read anew; the borders are the same each time."""
        return self.read(start)

    def rows(self) -> Iterator[SourceRow]:
        """All rows, read anew, one at a time. Raises `UserError` when a file is broken."""
        for chunk in self.chunks():
            yield from chunk.rows()


def open_source(spec: SourceSpec) -> Source:
    """The rows of an entry. Raises `UserError` when there is nothing at its path."""
    if is_url(spec.path):
        return _limited(_url_source(spec), spec)
    local = Path(resolve_package_path(spec.path)).expanduser()
    if spec.subset is not None and (local / spec.subset).is_dir():
        local = local / spec.subset
    if local.is_dir():
        saved = (local / "state.json").exists() or (local / "dataset_dict.json").exists()
        return _limited(_saved_source(local, spec) if saved else _files_source(_files_of(local, spec), spec), spec)
    if local.exists():
        if not local.is_file():
            raise UserError(f"data set {spec.path}: neither a file nor a directory. Fix: correct `path`.")
        return _limited(_files_source([local], spec), spec)
    if local.suffix.lower() in READERS or not is_hub_id(spec.path):
        nearest = _nearest_name(local)
        raise UserError(
            f"data set {spec.path}: no such file or directory. Fix: correct `path`"
            + (f"; did you mean {nearest}?" if nearest else ".")
        )
    return _limited(_hub_source(spec), spec)


def _limited(source: Source, spec: SourceSpec) -> Source:
    if spec.samples is None:
        return source
    return Source(
        name=source.name,
        digest=hashlib.sha256(f"{source.digest} first {spec.samples}".encode()).hexdigest(),
        read=lambda start: _chunked(islice(source.rows(), spec.samples), start),
    )


def _chunked(rows: Iterator[SourceRow], start: Place, *, skipped: int = 0, done: int = 0) -> Iterator[RowChunk]:
    """Rows of file `start[0]` as chunks from row `start[2]` on; `skipped` of them are left out already."""
    file, _, first = start
    rows = islice(rows, first - skipped, None)
    while content := list(islice(rows, _CHUNK_ROWS)):
        first += len(content)
        yield RowChunk(content, (file, 0, first), done)


# ------------------------------------------------------------------------------ local files


def _files_source(files: list[Path], spec: SourceSpec) -> Source:
    for file in files:
        if file.suffix.lower() not in READERS:
            raise UserError(
                f"data set {file}: files ending in {file.suffix or 'nothing'!r} cannot be read. "
                f"Fix: use one of {', '.join(sorted(READERS))}."
            )
    digest, size = hashlib.sha256(), 0
    for file in files:
        with _readable(file), file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
            size += handle.tell()

    def read(start: Place) -> Iterator[Chunk]:
        done = sum(file.stat().st_size for file in files[: start[0]])
        for number, file in enumerate(files[start[0] :], start=start[0]):
            yield from _file_chunks(file, start if number == start[0] else (number, 0, 0), done)
            done += file.stat().st_size

    return Source(name=Path(spec.path).name, digest=digest.hexdigest(), read=read, size=size)


def _file_chunks(file: Path, start: Place, done: int) -> Iterator[Chunk]:
    if READERS[file.suffix.lower()] != "json":
        yield from _chunked(_library_rows(str(file), file.suffix.lower(), start[2]), start, skipped=start[2], done=done)
        return
    with _readable(file), file.open("rb") as handle:
        yield from _json_chunks(str(file), handle, start, done)


def _files_of(directory: Path, spec: SourceSpec) -> list[Path]:
    """The directory's data files of the wanted split, sorted by path."""
    files = sorted(
        path
        for path in directory.rglob("*")  # does not follow links to directories, so it cannot loop
        if path.suffix.lower() in READERS
        and path.is_file()
        and not any(part.startswith((".", "_")) for part in path.relative_to(directory).parts)
    )
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(_split_of(path.relative_to(directory)), []).append(path)
    if spec.split in by_split:
        return by_split[spec.split]
    if not files:
        raise UserError(
            f"data set {spec.path}: the directory holds no data files. "
            f"Fix: put files ending in {', '.join(sorted(READERS))} there, or correct `path`."
        )
    raise UserError(
        f"data set {spec.path}: no file of split {spec.split!r}; the directory has "
        f"{', '.join(f'{split} ({len(paths)} files)' for split, paths in sorted(by_split.items()))}. "
        f"Fix: set `split`."
    )


def _split_of(path: Path) -> str:
    words = set(re.split(r"[^a-z]+", str(path.with_suffix("")).lower()))
    return next((split for split, names in SPLIT_WORDS.items() if words & set(names)), "train")


def _nearest_name(path: Path) -> str | None:
    import difflib

    try:
        names = [sibling.name for sibling in path.parent.iterdir()]
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, names, n=1)
    return str(path.parent / close[0]) if close else None


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"data set {file}: cannot be read: {error.strerror}.") from error


# ------------------------------------------------------------------------------------- JSON


def _json_chunks(file: str, handle: IO[bytes], start: Place, done: int) -> Iterator[Chunk]:
    at = len(_BOM) if handle.read(len(_BOM)) == _BOM else 0
    handle.seek(at)
    head = b" "
    while head and not head.strip():  # a file may begin with any number of blank lines
        head = handle.read(4096)
    if head.lstrip().startswith(b"["):
        handle.seek(at)
        yield from _chunked(_array_rows(file, handle), start, done=done)
        return
    at = max(at, start[1])
    handle.seek(at)
    yield from _line_chunks(file, handle, (start[0], at, start[2]), done)


def _line_chunks(file: str, handle: IO[bytes], start: Place, done: int) -> Iterator[Chunk]:
    number, at, lines = start
    while content := handle.read(_BLOCK):
        if not content.endswith(b"\n"):
            content += handle.readline(_LONGEST_LINE)
        at += len(content)
        broken = not content.endswith(b"\n") and len(content) >= _LONGEST_LINE
        content = content.removesuffix(b"\n")
        first, lines = lines + 1, lines + content.count(b"\n") + 1
        if not broken:
            yield LineChunk(file, first, content, (number, at, lines), done + at)
            continue
        whole, _, _ = content.rpartition(b"\n")
        while (rest := handle.readline(_BLOCK)) and not rest.endswith(b"\n"):
            at += len(rest)
        at += len(rest)
        after = (number, at, lines)
        error = RowError(f"the line is longer than {_LONGEST_LINE:,} bytes")
        rows = [*LineChunk(file, first, whole, after, 0).rows(), (f"{file}:{lines}", error)]
        yield RowChunk(rows, after, done + at)


def _parsed(line: bytes) -> Mapping[str, Any] | RowError:
    """The row on a line of JSON."""
    try:
        return _as_row(json.loads(line))
    except UnicodeDecodeError as error:
        return RowError(f"not UTF-8 at byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        return RowError(f"not JSON at column {error.colno}: {error.msg}")
    except ValueError as error:  # a number with too many digits
        return RowError(f"not readable: {_reason(error)}")
    except RecursionError:
        return RowError("nested too deeply")


def _array_rows(file: str, handle: IO[bytes]) -> Iterator[SourceRow]:
    """The elements of one JSON array, read in blocks; the place is the line an element begins at."""
    decoder = json.JSONDecoder()
    decode = codecs.getincrementaldecoder("utf-8")()
    text, line, ended = "", 1, False

    def more() -> None:
        nonlocal text, ended
        block = handle.read(max(_BLOCK, len(text)))  # grows with the element, so that a big one stays linear
        ended = not block
        text += decode.decode(block, final=ended)

    try:
        more()
        opening = text.index("[") + 1
        line += text.count("\n", 0, opening)
        text = text[opening:]
        while True:
            body = text.lstrip(" \t\r\n,")
            line += text.count("\n", 0, len(text) - len(body))
            text = body
            if not text and not ended:
                more()
                continue
            if text.startswith("]"):
                return
            try:
                row, end = decoder.raw_decode(text)
                if end == len(text) and not ended:  # a number may go on in the next block
                    more()
                    continue
            except json.JSONDecodeError as error:
                if not ended and len(text) < _LARGEST_ELEMENT:
                    more()
                    continue
                raise UserError(
                    f"data set {file}:{line + error.lineno - 1}: the JSON array is broken: {error.msg}. "
                    f"Fix: mend the file; one object a line (.jsonl) loses only the broken line."
                ) from error
            yield f"{file}:{line}", _as_row(row)
            line += text.count("\n", 0, end)
            text = text[end:]
    except UnicodeDecodeError as error:
        raise UserError(f"data set {file}: not UTF-8. Fix: save it as UTF-8.") from error
    except UserError:
        raise
    except ValueError as error:  # a number with too many digits
        raise UserError(f"data set {file}:{line}: cannot be read: {_reason(error)}") from error
    except RecursionError as error:
        raise UserError(f"data set {file}:{line}: an element is nested too deeply.") from error


def _as_row(value: Any) -> Mapping[str, Any] | RowError:
    if isinstance(value, dict):
        return value
    return RowError(f"a row must be a JSON object, this is {_kind(value)}")


def _kind(value: Any) -> str:
    match value:
        case list():
            return "an array"
        case str():
            return "a string"
        case None:
            return "null"
        case bool():
            return "a boolean"
        case _:
            return "a number"


# --------------------------------------------------------------------- the datasets library


def _library_rows(path: str, suffix: str, skip: int = 0) -> Iterator[SourceRow]:
    if not is_url(path):
        if "::" in path:
            raise UserError(f"data set {path}: a name with '::' cannot be read. Fix: rename the file.")
        if Path(path).suffix.lower() == ".parquet" and _has_no_rows(path):
            return iter(())

    def load() -> Any:
        import datasets

        options: dict[str, Any] = {"sep": "\t"} if suffix == ".tsv" else {}
        # The library takes patterns: a file's own * would match others.
        files = [path if is_url(path) else glob.escape(path)]
        return datasets.load_dataset(READERS[suffix], data_files=files, split="train", streaming=True, **options)

    return _numbered(path, load, skip)


def _has_no_rows(path: str) -> bool:
    """Whether a Parquet file is whole and empty, which the library takes for broken."""
    from pyarrow import ArrowException, parquet

    try:
        return bool(parquet.read_metadata(path).num_rows == 0)
    except (ArrowException, OSError):
        return False


def _numbered(name: str, load: Callable[[], Any], skip: int = 0) -> Iterator[SourceRow]:
    """Rows of what `load` gives, a data set of the library, without the first `skip`."""
    # What the library logs of a broken file is in our message too.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    done = skip
    try:
        data = load()
        for done, row in enumerate(data.skip(skip) if skip else data, start=skip + 1):
            yield f"{name} row {done}", row
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # datasets, pyarrow, pandas, fsspec and hub clients share no base class
        after = f" after {done} rows" if done else ""
        raise UserError(
            f"data set {name}: cannot be read{after}: {_reason(error)} Fix: check that the file is whole."
        ) from error


def _url_source(spec: SourceSpec) -> Source:
    suffix = Path(spec.path.split("?")[0]).suffix.lower()
    if suffix not in READERS:
        raise UserError(f"data set {spec.path}: a URL must end in one of {', '.join(sorted(READERS))}.")
    import fsspec

    try:
        filesystem, inner = fsspec.core.url_to_fs(spec.path)
        identity = {"url": spec.path, **{k: v for k, v in filesystem.info(inner).items() if k in _URL_IDENTITY}}
    except Exception as error:  # each file system has its own errors
        raise UserError(f"data set {spec.path}: cannot be reached: {_reason(error)} Fix: check `path`.") from error
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
    return Source(
        name=spec.path.rsplit("/", 1)[-1], digest=digest, read=lambda start: _url_chunks(spec.path, suffix, start)
    )


def _url_chunks(url: str, suffix: str, start: Place) -> Iterator[Chunk]:
    if READERS[suffix] != "json":
        yield from _chunked(_library_rows(url, suffix, start[2]), start, skipped=start[2])
        return
    import fsspec

    try:
        with fsspec.open(url, "rb") as handle:
            yield from _json_chunks(url, handle, start, 0)
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # each file system has its own errors
        raise UserError(
            f"data set {url}: cannot be read: {_reason(error)} Fix: check `path` and the network."
        ) from error


_URL_IDENTITY = ("size", "ETag", "etag", "mtime", "LastModified", "updated", "md5Hash", "crc32c")


def _saved_source(directory: Path, spec: SourceSpec) -> Source:
    """A directory written by `datasets`' `save_to_disk`."""
    import datasets

    try:
        data = datasets.load_from_disk(str(directory))
    except Exception as error:
        raise UserError(f"data set {spec.path}: cannot be read: {_reason(error)}") from error
    if isinstance(data, datasets.DatasetDict):
        if spec.split not in data:
            raise UserError(f"data set {spec.path}: no split {spec.split!r}, only {', '.join(data)}. Fix: set `split`.")
        data = data[spec.split]
    digest = hashlib.sha256()
    for file in sorted({Path(cached["filename"]) for cached in data.cache_files}):
        with _readable(file), file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return Source(name=directory.name, digest=digest.hexdigest(), read=_reader(spec.path, data))


def _reader(name: str, data: Any) -> Callable[[Place], Iterator[Chunk]]:
    """Chunks of a data set of the library."""
    return lambda start: _chunked(_numbered(name, lambda: data, start[2]), start, skipped=start[2])


def _hub_source(spec: SourceSpec) -> Source:
    import datasets

    try:
        data = datasets.load_dataset(spec.path, name=spec.subset, split=spec.split, revision=spec.revision)
    except Exception as error:  # see _numbered
        offline = (
            "unset HF_HUB_OFFLINE and HF_DATASETS_OFFLINE, or download it first"
            if datasets.config.HF_HUB_OFFLINE
            else "check `path`, `subset`, `split` and `revision`, and your network and access"
        )
        raise UserError(
            f"data set {spec.path}: neither a file here nor a data set that the hub gives: {_reason(error)} "
            f"Fix: {offline}."
        ) from error
    return Source(
        name=spec.path,
        digest=hashlib.sha256(f"{spec.path} {data._fingerprint}".encode()).hexdigest(),
        read=_reader(spec.path, data),
    )


def _reason(error: BaseException) -> str:
    cause = error
    while cause.__cause__ is not None:  # datasets wraps what the reader said
        cause = cause.__cause__
    lines = str(cause).strip().splitlines()
    text = (lines[0] if lines else type(cause).__name__).rstrip()
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if text.endswith(".") else f"{text}."
