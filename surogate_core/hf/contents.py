"""Digests of the contents of a base's weight files: headers do not distinguish two models of the same shape.

The data of a file (all bytes after its header) is read in pieces by several threads. The digest of a file is that of
its pieces' digests. It is kept in the cache directory under the file's path, size, times and inode, so that a file is
read once.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import xxhash

from surogate_core.errors import MachineError, SurogateError, UserError
from surogate_core.files import atomic
from surogate_core.files.foreign import read_json
from surogate_core.files.paths import cache_root
from surogate_core.files.tensorfile import TensorFile
from surogate_core.host import cores

PIECE = 8 * 2**20
"""Bytes that a thread reads at a time."""

_THREADS = 8
_SETTLED_NS = 2 * 10**9
"""A file that changed less than this many nanoseconds before it was read may change again within the same clock
tick.
"""
_SHOWN = 3

log = structlog.get_logger(__name__)


def digest_cache(data_cache_dir: str | None) -> Path:
    """The directory of kept digests; `data_cache_dir` is the key of the configuration."""
    return cache_root(data_cache_dir) / "weights"


class Contents:
    """Digests of files, read in the background from construction on; call `close` at the end."""

    def __init__(self, files: Mapping[str, TensorFile], cache: Path):
        """`files`: name → file. `cache`: the directory of kept digests, made when it is needed."""
        self._cache = cache
        self._over = threading.Event()
        self._local = threading.local()
        self._known: dict[str, str] = {}
        self._reading: dict[str, _Reading] = {}
        threads = min(_THREADS, cores())
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="surogate-digests")
        for name, file in files.items():
            facts = _facts(file.path)
            kept = self._kept(file.path, facts)
            if kept is not None:
                self._known[name] = kept
                continue
            begin = min((info.begin for info in file.infos.values()), default=facts["size"])
            places = range(begin, facts["size"], PIECE)
            pieces = [self._pool.submit(self._piece, file.path, place) for place in places]
            self._reading[name] = _Reading(path=file.path, facts=facts, pieces=pieces, began=time.time_ns())

    def digests(self) -> dict[str, str]:
        """File name → digest (hex) of its data; waits until all files are read. Raises `MachineError` if a read
        fails.
        """
        for name, reading in list(self._reading.items()):
            digest = xxhash.xxh3_128(b"".join(piece.result() for piece in reading.pieces)).hexdigest()
            self._known[name] = digest
            self._keep(reading, digest)
            del self._reading[name]
        return dict(sorted(self._known.items()))

    def close(self) -> None:
        """Stop reading."""
        self._over.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _piece(self, path: Path, place: int) -> bytes:
        if self._over.is_set():
            return b""
        local = self._local
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(PIECE)
        digest, view = xxhash.xxh3_128(), memoryview(local.buffer)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(place)
                left = PIECE
                while left and (count := file.readinto(view[:left])):
                    digest.update(view[:count])
                    left -= count
        except OSError as error:
            raise MachineError(f"{path}: cannot be read: {error.strerror or error}.") from error
        return digest.digest()

    def _entry(self, path: Path) -> Path:
        key = hashlib.sha256(str(path.resolve()).encode(errors="surrogateescape")).hexdigest()[:32]
        return self._cache / f"{key}.json"

    def _kept(self, path: Path, facts: Mapping[str, Any]) -> str | None:
        try:
            values = read_json(self._entry(path))
        except (OSError, ValueError):
            return None
        if not isinstance(values, dict) or values.get("file") != facts:
            return None
        digest = values.get("digest")
        return digest if isinstance(digest, str) else None

    def _keep(self, reading: _Reading, digest: str) -> None:
        """Store a digest; if it cannot be written, it is computed again next time."""
        facts = reading.facts
        if _facts(reading.path) != facts or reading.began - max(facts["mtime_ns"], facts["ctime_ns"]) < _SETTLED_NS:
            return
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"file": facts, "digest": digest})
            atomic.replace_file(self._entry(reading.path), text.encode(), key="data_cache_dir")
        except (OSError, SurogateError) as error:
            log.info("the digest of a weight file is not kept", path=str(reading.path), reason=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    path: Path
    facts: dict[str, Any]
    pieces: list[Future[bytes]]
    began: int
    """Nanoseconds since 1970."""


def _facts(path: Path) -> dict[str, Any]:
    """The facts that a kept digest must match."""
    found = path.stat()
    return {
        "path": str(path.resolve()),
        "device": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }


def contents_of(files: Mapping[str, TensorFile], cache: Path) -> dict[str, str]:
    """File name → digest (hex) of its data, at once."""
    contents = Contents(files, cache)
    try:
        return contents.digests()
    finally:
        contents.close()


def check_contents(saved: Mapping[str, Any], files: Mapping[str, str], *, frozen: bool, path: Path) -> str | None:
    """Compare the base of a checkpoint (its state, its `path`) with the run's `files` (name → digest of its data).

    Raises `UserError` where `frozen` weights are not those that the adapter was trained on. Otherwise returns a note:
    a run that trains all weights has them in its checkpoint, and an old checkpoint does not say what the base was.
    """
    before = saved.get("base_files")
    if before is None:
        return (
            f"{path} has no digests of the base's weight files, as later checkpoints have; only their "
            f"names, shapes and sizes were compared."
            if files
            else None
        )
    if not (found := differences(before, files)):
        return None
    if not frozen:
        return f"The base changed since {path} was saved ({found}). The checkpoint has all weights: the run continues."
    raise UserError(
        f"{path}: the adapter was trained on a base with different weights: {found}. That base was "
        f"{saved.get('base_model')}. Fix: set model to the original base, or resume_from_checkpoint=false to start "
        f"anew."
    )


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The differences between two bases, in a few words; empty if there are none."""
    found = [
        f"{name} {'has other contents' if name in before and name in now else 'is only in one of them'}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
