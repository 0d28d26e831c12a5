"""Files and directories that are what they seem, in places that others may write to too."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

Opener = Callable[[str | Path, int], int]
"""An `opener` of the built-in `open`: (path, flags of `os.open`) → descriptor."""


def regular(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """`os.open` of a regular file, also as the `opener` of the built-in `open`; raises `OSError` for anything else.

    Somebody who may write to the directory may have put a symbolic link or a pipe under the name. The one would lead
    to a file elsewhere, and the other would block.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.EEXIST, "it is a symbolic link", str(path)) from None
        if error.errno == errno.ENXIO:
            raise OSError(errno.EEXIST, "it is not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EEXIST, "it is not a regular file", str(path))
    return descriptor


def private(path: str | Path, flags: int) -> int:
    """`regular` for a file that only its owner may read, whatever the umask is; a file that is there is made so."""
    descriptor = regular(path, flags, 0o600)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
            os.fchmod(descriptor, 0o600)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def private_directory(path: Path) -> Path:
    """Make a directory that only this user may enter; raises `OSError` where another user could put files into it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            # Its entries can be renamed by anybody, this one too.
            raise OSError(errno.EPERM, f"everyone may write to {parent}", str(path))
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise OSError(errno.ENOTDIR, "it is not a directory", str(path)) from None
        if status.st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"it belongs to the user with the id {status.st_uid}", str(path)) from None
        if stat.S_IMODE(status.st_mode) & 0o022:
            raise OSError(errno.EPERM, "others may write to it", str(path)) from None
        with suppress(OSError):  # of a file system that is read only; that others read is no danger
            path.chmod(0o700)
    return path
