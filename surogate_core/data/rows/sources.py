"""Rows of a `datasets` entry, streamed: local files and directories, ``pkg://`` data, URLs, hub ids.

JSON, CSV, Parquet and Arrow have readers of our own, so that every row is read or named by its place; the `datasets`
library reads what it has saved and what is on the hub.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, MinLen

from surogate_core.data.rows.arrow_rows import arrow_rows, parquet_rows, unpadded
from surogate_core.data.rows.chunks import START, Chunk, Place, SourceRow, chunked
from surogate_core.data.rows.csv_rows import csv_rows
from surogate_core.data.rows.files import FileKind, decompressed, kind_of, list_directory, readable, readable_suffixes
from surogate_core.data.rows.json_rows import json_chunks
from surogate_core.errors import UserError, printable
from surogate_core.files.paths import is_hub_id, is_url, resolve_package_path

READERS_VERSION = 3
"""Incremented when the same files give other rows; part of the key of their tokens."""

MOST_PASSES = 10_000
"""Largest weight of a data set; a larger one is probably a mistake, and an epoch would never end."""

_Rows = Iterator[SourceRow]

_EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"} | dict.fromkeys(
    ("abfs", "az", "adl"), "abfs"
)
"""Scheme of a URL → the extra of fsspec that installs what reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """The fields of a `datasets` entry that say which rows it means."""

    path: Annotated[str, MinLen(1)]
    """File, directory, ``pkg://package/file``, URL or hub id."""
    subset: str | None = None
    """Configuration of a hub data set, or a subdirectory of a local one."""
    split: str = "train"
    """Split of a hub data set or of a directory; a single file has only one."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set; null is its main branch."""
    samples: Annotated[int, Ge(1)] | None = None
    """Take this many rows from the beginning; null takes all."""
    weight: Annotated[float, Gt(0), Le(MOST_PASSES)] = 1.0
    """How often an epoch takes its documents: 2 takes each twice, 0.5 a half of them, chosen by `train_seed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Rows that can be read any number of times."""

    name: str
    """Short name for progress and messages."""
    digest: str
    """SHA-256 of the content, or of what identifies it where the content is not at hand."""
    read: Callable[[Place], Iterator[Chunk]]
    """Reads chunks from a border on. Raises `UserError` when a file is broken."""
    size: int = 0
    """Bytes of all chunks; 0 where they are not known."""
    left_out: tuple[str, ...] = ()
    """Files of the directory that are not read, each with the reason."""
    other_splits: tuple[str, ...] = ()
    """Data files of the directory that belong to another split, each with its name."""

    def chunks(self, start: Place = START) -> Iterator[Chunk]:
        """Read anew; the borders are the same each time."""
        return self.read(start)

    def rows(self) -> Iterator[SourceRow]:
        """All rows, read anew, one at a time. Raises `UserError` when a file is broken."""
        for chunk in self.chunks():
            yield from chunk.rows()


def open_source(spec: SourceSpec) -> RowSource:
    """The rows of an entry. Raises `UserError` when there is nothing at its path."""
    if is_url(spec.path):
        _refuse_fields(spec, "a URL", "subset", "revision")
        return _limited(_url_source(spec), spec)
    local = Path(resolve_package_path(spec.path)).expanduser()
    if local.exists():
        _refuse_fields(spec, "on this machine", "revision", *(["subset"] if local.is_file() else []))
    if spec.subset is not None and local.is_dir():
        if not (local / spec.subset).is_dir():
            names = sorted(path.name for path in local.iterdir() if path.is_dir() and path.name[0] not in "._")
            raise UserError(
                f"data set {spec.path}: no subdirectory {spec.subset!r}, which `subset` names; "
                f"the directory has {', '.join(names) or 'none'}. Fix: correct `subset`, or leave it out."
            )
        local = local / spec.subset
    if local.is_dir():
        saved = (local / "state.json").exists() or (local / "dataset_dict.json").exists()
        return _limited(_saved_source(local, spec) if saved else _directory_source(local, spec), spec)
    if local.exists():
        if not local.is_file():
            raise UserError(f"data set {spec.path}: neither a file nor a directory. Fix: correct `path`.")
        return _limited(_files_source([local], spec), spec)
    if not isinstance(kind_of(local.name), str) or not is_hub_id(spec.path):
        nearest = _nearest_name(local)
        raise UserError(
            f"data set {spec.path}: no such file or directory. Fix: correct `path`"
            + (f"; did you mean {nearest}?" if nearest else ".")
        )
    return _limited(_hub_source(spec), spec)


def _refuse_fields(spec: SourceSpec, what: str, *fields: str) -> None:
    """Raise `UserError` for fields of the entry that would be ignored."""
    given = [f"`{name}`" for name in fields if getattr(spec, name) is not None]
    if given:
        raise UserError(
            f"data set {spec.path}: {' and '.join(given)} would be ignored: the data set is {what}. "
            f"Fix: leave {'it' if len(given) == 1 else 'them'} out."
        )


def _limited(source: RowSource, spec: SourceSpec) -> RowSource:
    if spec.samples is None:
        return source
    return dataclasses.replace(
        source,
        digest=hashlib.sha256(f"{source.digest} first {spec.samples}".encode()).hexdigest(),
        read=lambda start: chunked(islice(source.rows(), min(spec.samples or 0, sys.maxsize)), start),
        size=0,
    )


# ------------------------------------------------------------------------------ local files


def _directory_source(directory: Path, spec: SourceSpec) -> RowSource:
    """The directory's data files of the wanted split."""
    found = list_directory(directory)
    if not found.splits:
        only = f"; it has {', '.join(found.left_out[:5])}" if found.left_out else ""
        raise UserError(
            f"data set {spec.path}: the directory holds no data files{only}. "
            f"Fix: put files ending in {readable_suffixes()} there, or correct `path`."
        )
    if spec.split not in found.splits:
        raise UserError(
            f"data set {spec.path}: no file of split {spec.split!r}; the directory has "
            f"{', '.join(f'{split} ({len(paths)} files)' for split, paths in sorted(found.splits.items()))}. "
            f"Fix: set `split`."
        )
    source = _files_source(found.splits[spec.split], spec)
    others = tuple(
        f"{path.relative_to(directory)} (split {split})"
        for split, paths in sorted(found.splits.items())
        if split != spec.split
        for path in paths
    )
    return dataclasses.replace(source, left_out=found.left_out, other_splits=others)


def _files_source(files: list[Path], spec: SourceSpec) -> RowSource:
    kinds = []
    for file in files:
        kind = kind_of(file.name)
        if isinstance(kind, str):
            raise UserError(f"data set {file}: {kind}. Fix: use one of {readable_suffixes()}.")
        kinds.append(kind)
    digest, size = hashlib.sha256(), 0
    for file in files:
        with readable(str(file)), file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
            size += handle.tell()

    def read(start: Place) -> Iterator[Chunk]:
        done = sum(file.stat().st_size for file in files[: start[0]])
        for number, file in enumerate(files[start[0] :], start=start[0]):
            yield from _file_chunks(file, kinds[number], start if number == start[0] else (number, 0, 0), done)
            done += file.stat().st_size

    return RowSource(name=Path(spec.path).name, digest=digest.hexdigest(), read=read, size=size)


def _file_chunks(file: Path, kind: FileKind, start: Place, done: int) -> Iterator[Chunk]:
    name, opened = str(file), lambda: decompressed(file.open("rb"), kind.compression)
    match kind.reader:
        case "json":
            with readable(name):
                yield from json_chunks(name, opened, start, done=done, sized=kind.compression is None)
        case "csv":
            with readable(name):
                yield from chunked(csv_rows(name, opened, kind.suffix), start, done=done)
        case _:
            rows = _table_rows(name, lambda: file.open("rb"), kind, start[2])
            yield from chunked(rows, start, skipped=start[2], done=done)


def _nearest_name(path: Path) -> str | None:
    import difflib

    try:
        names = [sibling.name for sibling in path.parent.iterdir()]
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, names, n=1)
    return str(path.parent / close[0]) if close else None


# --------------------------------------------------------------------- the datasets library


def _table_rows(name: str, opened: Callable[[], AbstractContextManager[IO[bytes]]], kind: FileKind, skip: int) -> _Rows:
    """The rows of a Parquet or Arrow file."""
    if not is_url(name) and "::" in name:
        raise UserError(f"data set {name}: a name with '::' cannot be read. Fix: rename the file.")
    read = parquet_rows if kind.reader == "parquet" else arrow_rows

    def rows() -> Iterator[Any]:
        with opened() as handle:
            yield from read(name, handle, skip)

    return _numbered(name, rows, skip)


def _numbered(name: str, rows: Callable[[], Iterator[Any]], skip: int = 0) -> _Rows:
    """The rows, with their places; the first of them is number `skip`."""
    # Our message contains what the library logs about a broken file.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    done = skip
    try:
        for done, row in enumerate(rows(), start=skip + 1):
            yield f"{name} row {done}", row
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # datasets, pyarrow, pandas, fsspec and hub clients share no base class
        after = f" after {done} rows" if done else ""
        raise UserError(
            f"data set {name}: cannot be read{after}: {_reason(error)} Fix: check that the file is whole."
        ) from error


def _url_source(spec: SourceSpec) -> RowSource:
    name = urlsplit(spec.path).path
    kind = kind_of(name)
    if isinstance(kind, str):
        raise UserError(f"data set {spec.path}: a URL must end in one of {readable_suffixes()}.")
    import fsspec

    try:
        filesystem, inner = fsspec.core.url_to_fs(spec.path)
        identity = {"url": spec.path, **{k: v for k, v in filesystem.info(inner).items() if k in _URL_IDENTITY}}
    except ImportError as error:
        scheme = spec.path.partition("://")[0]
        extra = _EXTRAS.get(scheme)
        how = f"`pip install 'fsspec[{extra}]'`, or download" if extra else "install the package that does, or download"
        raise UserError(
            f"data set {spec.path}: the package that reads {scheme}:// is not installed: {_reason(error)} "
            f"Fix: {how} the file and name its path."
        ) from error
    except Exception as error:  # each file system has its own errors
        raise UserError(f"data set {spec.path}: cannot be reached: {_reason(error)} Fix: check `path`.") from error
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
    return RowSource(name=Path(name).name, digest=digest, read=partial(_url_chunks, spec.path, kind))


def _url_chunks(url: str, kind: FileKind, start: Place) -> Iterator[Chunk]:
    def opened() -> AbstractContextManager[IO[bytes]]:
        import fsspec

        return decompressed(fsspec.open(url, "rb"), kind.compression)

    try:
        match kind.reader:
            case "json":
                yield from json_chunks(url, opened, start, sized=False)
            case "csv":
                yield from chunked(csv_rows(url, opened, kind.suffix), start)
            case _:
                yield from chunked(_table_rows(url, opened, kind, start[2]), start, skipped=start[2])
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # each file system has its own errors
        raise UserError(
            f"data set {url}: cannot be read: {_reason(error)} Fix: check `path` and the network."
        ) from error


_URL_IDENTITY = ("size", "ETag", "etag", "mtime", "LastModified", "updated", "md5Hash", "crc32c")


def _saved_source(directory: Path, spec: SourceSpec) -> RowSource:
    """A directory written by `datasets`' `save_to_disk`."""
    import datasets

    try:
        data = datasets.load_from_disk(str(directory))
    except Exception as error:
        raise UserError(f"data set {spec.path}: cannot be read: {_reason(error)}") from error
    others: tuple[str, ...] = ()
    if isinstance(data, datasets.DatasetDict):
        if spec.split not in data:
            raise UserError(f"data set {spec.path}: no split {spec.split!r}, only {', '.join(data)}. Fix: set `split`.")
        others = tuple(f"split {name}" for name in data if name != spec.split)
        data = data[spec.split]
    digest = hashlib.sha256()
    for file in sorted({Path(cached["filename"]) for cached in data.cache_files}):
        with readable(str(file)), file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    read = _reader(spec.path, data)
    return RowSource(name=directory.name, digest=digest.hexdigest(), read=read, other_splits=others)


def _reader(name: str, data: Any) -> Callable[[Place], Iterator[Chunk]]:
    """Chunks of a data set of the library."""
    kinds = dict(zip((schema := data.features.arrow_schema).names, schema.types, strict=True))

    def rows(skip: int) -> Iterator[Any]:
        for row in data.skip(skip) if skip else data:
            yield {name: unpadded(value, kinds[name], json_is_text=False) for name, value in row.items()}

    return lambda start: chunked(_numbered(name, lambda: rows(start[2]), start[2]), start, skipped=start[2])


def _hub_source(spec: SourceSpec) -> RowSource:
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
    return RowSource(
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
    text = printable(text)
    return text if text.endswith(".") else f"{text}."
