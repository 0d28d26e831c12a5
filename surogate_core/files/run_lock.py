"""The lock that a run holds on its output directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

LOCK = ".lock"


def is_running(directory: Path) -> bool:
    """Whether a run of any process on this machine holds the directory's lock, which ends with the process.

    To find out, the lock is shared for a moment; a run that begins in this moment tries again.
    """
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False
