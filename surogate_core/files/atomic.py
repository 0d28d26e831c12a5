"""Directories and files that are either the old one or the new one, whatever kills the process.

A directory is written under a hidden sibling name, synced, and renamed into place. Its siblings: ``.NAME.surogate-tmp``
is being written, ``.NAME.surogate-old`` is the one being replaced, and ``.NAME.surogate-trash`` is being deleted.
`recover` cleans up after a killed process.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surogate_core.errors import MachineError, SurogateError, UserError
from surogate_core.files.private import Opener, regular

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG)


def sibling(final: Path, kind: str) -> Path:
    """The hidden name beside `final` for `kind`: ``tmp``, ``old`` or ``trash``."""
    return final.with_name(f".{final.name}.surogate-{kind}")


def human_bytes(count: float) -> str:
    """``1.5 GiB`` for 1610612736; three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            # Three digits of 1000 to 1023 would be 1e+03.
            return f"{count:.0f} {unit}" if unit == "B" or count >= 999.5 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.0f} TiB" if count >= 999.5 else f"{count:.3g} TiB"


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the file system that holds `path`, which may not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def disk_error(error: OSError, *, what: str, path: Path, needed: int | None = None, fix: str = "") -> SurogateError:
    """The error to raise for a failed write: `MachineError` for the disk's fault, `UserError` for the place's."""
    fix = f" Fix: {fix}." if fix else ""
    if error.errno in _FULL:
        need = f"{human_bytes(needed)} needed, " if needed is not None else ""
        try:
            free = f"{human_bytes(free_bytes(path))} free"
        except OSError:
            free = "free space unknown"
        quota = " (quota)" if error.errno == errno.EDQUOT else ""
        return MachineError(f"{what} {path}: the disk is full{quota}: {need}{free}.{fix}")
    reason = error.strerror or str(error)
    if error.errno in _REFUSED:
        culprit = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
        return UserError(f"{what} {path}: cannot be written: {reason}{culprit}.{fix}")
    return MachineError(f"{what} {path}: writing failed: {reason}.{fix}")


def ensure_writable(directory: Path, *, key: str) -> None:
    """Make `directory` and prove that a file can be written in it; `key` is the config key that named it.

    Raises `UserError` or `MachineError`, so that a run ends before its first step and not at its first save.
    """
    # Processes with one number, in containers, and threads may probe the same directory at the same time.
    probe = directory / f".surogate-probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_file(probe, b"x")
        probe.unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink()
        raise disk_error(error, what=key, path=directory, fix=f"set {key} to a directory you may write in") from error


def ensure_writable_file(file: Path, *, key: str) -> None:
    """Prove that `file` can be written, and make its directory; `key` is the flag that named it.

    Raises `UserError` or `MachineError`, so that a command ends before its work and not after it.
    """
    if file.is_dir():
        raise UserError(f"{key} {file}: is a directory. Fix: name a file, such as {key} {file / 'output.jsonl'}")
    ensure_writable(file.parent, key=key)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Make every file and directory under `root` durable."""
    for directory, _, files in os.walk(root):
        for name in files:
            descriptor = os.open(Path(directory) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(directory))


def write_file(path: Path, data: bytes, *, opener: Opener = regular) -> None:
    """Write a file and replace whatever had the name, a link too. The caller syncs."""
    with suppress(FileNotFoundError):
        path.unlink()
    descriptor = opener(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_all(descriptor, memoryview(data))
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, key: str, opener: Opener = regular) -> None:
    """Write a file that is either the old one or whole; `key` is the config key that named its directory.

    `opener`: `private` for a file that only its owner may read.
    """
    temporary = sibling(path, "tmp")
    try:
        write_file(temporary, data, opener=opener)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        fix = f"free space, or set {key} to a directory you may write in"
        raise disk_error(error, what=key, path=path, fix=fix) from error


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of `data` (bytes); the kernel takes at most 2 GiB at a time."""
    while len(data):
        data = data[os.write(descriptor, data) :]


def remove_directory(path: Path) -> None:
    """Delete a directory so that it is never seen half deleted under its own name."""
    trash = sibling(path, "trash")
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def recover(final: Path) -> None:
    """Clean up after a killed replacement of `final`: restore the old directory or delete the leftovers."""
    old = sibling(final, "old")
    if old.exists():
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)
    for kind in ("tmp", "trash"):
        leftover = sibling(final, kind)
        if leftover.exists():
            shutil.rmtree(leftover)


@contextmanager
def replaced_directory(final: Path, *, what: str, needed: int | None = None, fix: str = "") -> Iterator[Path]:
    """Yield an empty directory that becomes `final` when the block ends, and vanishes if it fails.

    A former `final` stays whole until the new one is complete and synced, and is then deleted.
    `OSError`s leave as `MachineError` or `UserError` about `what`; `needed` is the bytes to be written.
    """
    temporary, old = sibling(final, "tmp"), sibling(final, "old")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        recover(final)
        if needed is not None and needed > free_bytes(final.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary.mkdir()
        yield temporary
        sync_tree(temporary)
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        sync_directory(final.parent)
    except BaseException as error:
        # The space must be measured before the partial files are deleted.
        translated = (
            disk_error(error, what=what, path=final, needed=needed, fix=fix) if isinstance(error, OSError) else None
        )
        with suppress(OSError):
            recover(final)
        if translated is None:
            raise
        raise translated from error
    # The next `recover` deletes what cannot be deleted now.
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def replaced_file(final: Path, *, what: str, fix: str = "") -> Iterator[Path]:
    """Yield a name to write that becomes `final` when the block ends, and vanishes if it fails.

    A former `final` stays until the new one is complete and synced. Errors as in `replaced_directory`.
    """
    temporary = sibling(final, "tmp")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(final)
        sync_directory(final.parent)
    except BaseException as error:
        translated = disk_error(error, what=what, path=final, fix=fix) if isinstance(error, OSError) else None
        with suppress(OSError):
            temporary.unlink()
        if translated is None:
            raise
        raise translated from error
