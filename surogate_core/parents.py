"""A process that does not outlive the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end it if that has happened."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
