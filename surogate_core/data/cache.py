"""A directory of finished results, keyed by a digest of what shapes them.

An entry is built under a temporary name, synced and renamed, and records the size of each of its
files: a killed build leaves nothing that is read, and a torn entry is built again. What a build
that can be resumed leaves, `<key>.partial`, is handed to the next one. A lock per entry makes two
runs that need the same one build it once.
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

META = "meta.json"

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
    """What its builder returned."""


class Cache:
    """Entries of one kind under ``root/kind/<key>/``."""

    def __init__(self, root: Path, kind: str):
        self._dir = root / kind

    def get(self, key: str) -> CacheEntry | None:
        """The entry, or None when it is absent or torn."""
        path = self._dir / key
        try:
            meta = json.loads((path / META).read_bytes())
            whole = all((path / name).stat().st_size == size for name, size in meta["files"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return CacheEntry(path=path, facts=meta["facts"]) if whole else None

    def get_or_build(
        self, key: str, build: Build, *, waiting: Callable[[], None] = lambda: None, resumable: bool = False
    ) -> CacheEntry:
        """The entry, built now unless it exists. `waiting` is called when another run is building it.

        What `build` raises passes through. Nothing is left of its work then, unless it is
        `resumable`: such a build is given the directory as the last one left it, and starts anew
        only after a `UserError`. Raises `MachineError` when the disk is full and `UserError` when
        the cache cannot be written.
        """
        found = self.get(key)
        if found is not None:  # needs no lock, so a cache that cannot be written serves too
            return found
        with _disk_errors(self._dir):
            self._dir.mkdir(parents=True, exist_ok=True)
            with self._lock(key, waiting):
                found = self.get(key)
                if found is not None:
                    return found
                # Whoever made these died: the lock is ours.
                for stale in (self._dir / key, *self._dir.glob(f"{key}.tmp-*")):
                    shutil.rmtree(stale, ignore_errors=True)
                temporary = self._dir / (f"{key}.partial" if resumable else f"{key}.tmp-{uuid.uuid4().hex}")
                temporary.mkdir(exist_ok=resumable)
                (temporary / META).unlink(missing_ok=True)  # of a build that was killed between its seal and its name
                finished = False
                try:
                    facts = build(temporary)
                    self._seal(temporary, facts)
                    temporary.rename(self._dir / key)
                    finished = True
                except UserError:
                    finished = True
                    raise
                finally:
                    if finished or not resumable:
                        shutil.rmtree(temporary, ignore_errors=True)
                _sync(self._dir)
        built = self.get(key)
        assert built is not None
        return built

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
    def _seal(directory: Path, facts: Mapping[str, Any]) -> None:
        files = sorted(path for path in directory.iterdir())
        meta = {"files": {path.name: path.stat().st_size for path in files}, "facts": dict(facts)}
        (directory / META).write_text(json.dumps(meta, indent=1))
        for path in (*files, directory / META, directory):
            _sync(path)


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


def cache_root(data_cache_dir: str | None) -> Path:
    """The directory that shards are kept in; null is the user's cache directory."""
    if data_cache_dir is not None:
        return Path(data_cache_dir).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("surogate")) / "data"
