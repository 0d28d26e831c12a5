"""What the code of an environment may use of the machine: limits that a worker process sets for itself."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import struct
import sys
import time
from pathlib import Path

CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 21, 24
PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION_3 = 0x20080522
_COUNT_SECONDS = 5.0
"""Between two counts of the processes of a user who has others; a run may start many."""
_OF_THE_RUN = 512
"""Threads that the user's run may start between two counts; the processes that compile kernels have hundreds."""
_OWN_USERS = 1_879_048_192
"""First of the user ids that root's workers take as their real one, each for itself; far above those of people."""


class ProcessLimits:
    """The limits of this process and of those that it starts.

    Where the machine has none, the wall clock of the parent is the only limit.
    """

    def __init__(self, *, memory: int, processes: int, file_size: int) -> None:
        """`memory`: bytes of each process. `processes`: their number. `file_size`: bytes of a file."""
        self._processes = processes
        self._has_own_user = sys.platform != "win32" and os.geteuid() == 0 and _took_own_user()
        self._next_count = -math.inf
        for name, value in (("RLIMIT_DATA", memory), ("RLIMIT_FSIZE", file_size), ("RLIMIT_CORE", 0)):
            _set(name, value)
        self.count()

    def count(self) -> None:
        """Set the limit on processes from the number that the user has now, unless that was done just before."""
        now = time.monotonic()
        if now < self._next_count:
            return
        self._next_count = math.inf if self._has_own_user else now + _COUNT_SECONDS
        _set("RLIMIT_NPROC", self._processes + (1 if self._has_own_user else _tasks_of(os.getuid()) + _OF_THE_RUN))
        if not _can_fork():
            # The user has processes that are not to be seen from here, for example outside of a container.
            _set("RLIMIT_NPROC", None)


def _set(name: str, value: int | None) -> None:
    """Set a soft limit if the machine has it; None is the hard one."""
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        if value is None or (hard != resource.RLIM_INFINITY and value > hard):
            value = hard
        resource.setrlimit(kind, (value, hard))


def _can_fork() -> bool:
    try:
        child = os.fork()
    except (AttributeError, OSError):
        return False
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return True


def allow_cpu(seconds: float) -> None:
    """End this process, and each that it starts, after that much more of CPU time."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        most = int(used.ru_utime + used.ru_stime + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _took_own_user() -> bool:
    """Take a real user id that no other process has, and give up what exempts root from the limit on processes.

    The kernel counts processes by their real user and does not count root's. The effective user stays root, so files
    stay readable. False if the machine does not allow it.
    """
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        os.setresuid(_OWN_USERS + os.getpid(), 0, 0)
        for capability in (CAP_SYS_ADMIN, CAP_SYS_RESOURCE):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
        held = ctypes.create_string_buffer(24)
        if libc.capget(header, held) == 0:
            words = list(struct.unpack("=6I", held.raw))
            kept = ~(1 << CAP_SYS_ADMIN | 1 << CAP_SYS_RESOURCE) & 0xFFFFFFFF
            words[:3] = [word & kept for word in words[:3]]
            libc.capset(header, struct.pack("=6I", *words))
        return True
    return False


def _tasks_of(user: int) -> int:
    """Threads of a user now, which the limit on processes counts."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == user:
                found += sum(1 for _ in (process / "task").iterdir())
    return found
