"""A directory of finished results, keyed by a digest of everything that determines them.

An entry is built under a temporary name, synced and renamed, and records the sizes and checksums of its files: a killed
build leaves nothing that a later run would read, and a torn or damaged entry is built again. A resumable build leaves
`<key>.partial`, from which the next build continues. A lock per entry makes two runs that need the same entry build it
once.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surogate_core.errors import MachineError, UserError
from surogate_core.host import cores

META = "meta.json"

_BLOCK = 64 << 20
"""Bytes of a file that have a checksum of their own, so that several threads check one file."""
_READ = 1 << 20
_MOST_THREADS = 8

Checked = Callable[[int, int], None]
"""Receives the bytes checked so far and their total, at most once per block."""

Build = Callable[[Path], Mapping[str, Any]]
"""Writes an entry's files into an empty directory and returns its JSON-able facts."""


def digest_of(content: Any) -> str:
    """SHA-256 of a JSON-able value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A finished entry."""

    path: Path
    facts: Mapping[str, Any]
    """The facts that its builder returned."""


class DataCache:
    """Entries of one kind under ``root/kind/<key>/``."""

    def __init__(self, root: Path, kind: str):
        self._dir = root / kind

    def get(
        self,
        key: str,
        *,
        damaged: Callable[[str], None] = lambda text: None,
        checked: Checked = lambda done, total: None,
    ) -> CacheEntry | None:
        """The entry, or None when it is absent, torn or damaged.

        All of its files are read. `damaged` receives a sentence on an entry that was whole once and is not now.
        Raises `UserError` when it may not be read.
        """
        path = self._dir / key
        try:
            content = (path / META).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UserError(
                f"The entry {path} of the data cache cannot be read: {error.strerror}. "
                f"Fix: correct its permissions, or set `data_cache_dir` elsewhere."
            ) from error
        try:
            meta = json.loads(content)
            facts = meta["facts"]
            wrong = _wrong(path, meta, checked)
        except OSError as error:
            wrong = f"{Path(error.filename or path).name}: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError):
            wrong = f"{META} is not what was written"
        if wrong:
            damaged(f"The entry {path} of the data cache was damaged: {wrong}; it was rebuilt.")
            return None
        return CacheEntry(path=path, facts=facts)

    def get_or_build(
        self,
        key: str,
        build: Build,
        *,
        waiting: Callable[[], None] = lambda: None,
        damaged: Callable[[str], None] = lambda text: None,
        checked: Checked = lambda done, total: None,
        resumable: bool = False,
    ) -> CacheEntry:
        """The entry, built now unless it exists. `waiting` is called when another run is building it.

        What `build` raises passes through. Nothing is left of its work then, unless it is
        `resumable`: such a build is given the directory as the last one left it, and starts anew
        only after a `UserError`. `damaged` and `checked` as in `get`; a damaged entry is built anew.
        Raises `MachineError` when the disk is full and `UserError` when the cache cannot be written.
        """
        found = self.get(key, damaged=damaged, checked=checked)
        if found is not None:  # needs no lock, so a cache that cannot be written can be used too
            return found
        with _disk_errors(self._dir):
            self._dir.mkdir(parents=True, exist_ok=True)
            with self._lock(key, waiting):
                found = self.get(key)
                if found is not None:
                    return found
                # The process that made these has ended, because the lock is ours.
                for stale in (self._dir / key, *self._dir.glob(f"{key}.tmp-*")):
                    shutil.rmtree(stale, ignore_errors=True)
                temporary = self._dir / (f"{key}.partial" if resumable else f"{key}.tmp-{uuid.uuid4().hex}")
                temporary.mkdir(exist_ok=resumable)
                (temporary / META).unlink(missing_ok=True)  # left if killed before the rename
                finished = False
                try:
                    facts = self._seal(temporary, build(temporary))
                    temporary.rename(self._dir / key)
                    finished = True
                except UserError:
                    finished = True
                    raise
                finally:
                    if finished or not resumable:
                        shutil.rmtree(temporary, ignore_errors=True)
                _sync(self._dir)
        return CacheEntry(path=self._dir / key, facts=facts)

    @contextmanager
    def _lock(self, key: str, waiting: Callable[[], None]) -> Iterator[None]:
        from filelock import FileLock, Timeout

        lock = FileLock(self._dir / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @staticmethod
    def _seal(directory: Path, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Record what the directory holds; the facts as they are read back."""
        files = sorted(path for path in directory.iterdir())
        sizes = {path.name: path.stat().st_size for path in files}
        meta = {
            "files": sizes,
            "checksums": _checksums(directory, sizes),
            "facts": json.loads(json.dumps(dict(facts))),
        }
        (directory / META).write_text(json.dumps({**meta, "digest": digest_of(meta)}, indent=1))
        for path in (*files, directory / META, directory):
            _sync(path)
        read_back: Mapping[str, Any] = meta["facts"]
        return read_back


def _wrong(directory: Path, meta: Mapping[str, Any], checked: Checked) -> str:
    """The first difference between an entry and its record; empty if there is none. Earlier versions wrote no
    checksums.
    """
    sealed = {name: value for name, value in meta.items() if name != "digest"}
    if set(meta) != {"files", "facts"} and digest_of(sealed) != meta["digest"]:
        return f"{META} is not what was written"
    files = meta["files"]
    for name, size in files.items():
        if (found := (directory / name).stat().st_size) != size:
            return f"{name} has {found:,} bytes instead of {size:,}"
    if "checksums" not in meta:
        return ""
    sums = _checksums(directory, files, checked)
    other = [name for name in files if sums[name] != meta["checksums"][name]]
    return f"{' and '.join(other)} {'is' if len(other) == 1 else 'are'} not what was written" if other else ""


def _checksums(
    directory: Path, files: Mapping[str, int], checked: Checked = lambda done, total: None
) -> dict[str, list[int]]:
    """CRC-32 of each block of each file, which notices every flipped bit; read by several threads."""
    from concurrent.futures import ThreadPoolExecutor

    blocks = [(name, start) for name, size in files.items() for start in range(0, size, _BLOCK)]
    sums: dict[str, list[int]] = {name: [] for name in files}
    total, done = sum(files.values()), 0
    with ThreadPoolExecutor(max(1, min(_MOST_THREADS, cores(), len(blocks)))) as pool:
        parts = pool.map(lambda block: _checksum(directory / block[0], block[1]), blocks)
        for (name, start), part in zip(blocks, parts, strict=True):
            sums[name].append(part)
            done += min(_BLOCK, files[name] - start)
            checked(done, total)
    return sums


def _checksum(path: Path, start: int) -> int:
    """CRC-32 of the block that begins at byte `start`."""
    import zlib

    value, left = 0, _BLOCK
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (content := file.read(min(_READ, left))):
            value = zlib.crc32(content, value)
            left -= len(content)
    return value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(
                f"The disk of the data cache {directory} is full. Fix: free space or set `data_cache_dir` elsewhere."
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UserError(
                f"The data cache {directory} cannot be written: {error.strerror}. "
                f"Fix: set `data_cache_dir` to a directory that can be."
            ) from error
        raise
