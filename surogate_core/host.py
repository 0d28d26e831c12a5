"""What this process may have of the host: its cores and its memory, within the limits of a container or a job.

A container, a job of SLURM and a pod of Kubernetes are control groups. The kernel slows or kills what exceeds their
limits, however much the machine has (cgroups(7); version 2, or version 1 with a hierarchy for each kind of limit).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS, GROUPS_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
"""Bytes from which a limit is none: version 1 has one that is nearly 2⁶³."""
MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
    2: ("memory.max", "memory.current", "inactive_file", "active_file"),
}
"""Version → the files of the limit and of what is used, and the lines of memory.stat for what is cached of files."""


def cores(ranks: int = 1) -> int:
    """CPU cores that this process may use, one of `ranks` that share the machine and may be bound to cores of their
    own.
    """
    found = os.cpu_count() or 1
    for group, version in _control_groups("cpu"):
        with suppress(OSError, ValueError):  # no such group, or "max"
            names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = (int(part) for name in names for part in _read(group / name).split())
            if quota > 0:
                found = min(found, quota // period)
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else found
    return max(min(bound, found // ranks), 1)


def memory_of_machine() -> int | None:
    """Bytes of memory that this process may have: the machine's, or the limit of its container; None if unknown."""
    limits = [limit for limit, _ in _memory_limits()]
    with suppress(ValueError, OSError, AttributeError):
        limits.append(math.prod(os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES")))
    return min(limits, default=None)


def free_host_memory() -> int:
    """Bytes of memory that this process may still take, of the machine's and of its container's. What the kernel keeps
    of files is free.
    """
    import psutil

    left = (max(limit - used, 0) for limit, used in _memory_limits())
    return min([int(psutil.virtual_memory().available), *left])


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, used without cached files) of each control group that has a limit, in bytes."""
    for group, version in _control_groups("memory"):
        limit_file, used_file, *cached = MEMORY_FILES[version]
        with suppress(OSError, ValueError):  # no such group, or "max"
            limit, used = int(_read(group / limit_file)), 0
            with suppress(OSError, ValueError):  # a sandbox may show the limit alone
                used = int(_read(group / used_file))
                words = _read(group / "memory.stat").split()
                used -= sum(int(value) for name, value in zip(words[::2], words[1::2], strict=False) if name in cached)
            if limit < UNLIMITED:
                yield limit, used


def _control_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """(directory, version) of each control group that this process is in, and of those around it."""
    with suppress(OSError, ValueError):  # no such file, or one of another form
        for line in _read(GROUPS_OF_PROCESS).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = GROUPS / controller if controllers else GROUPS
            # In a container the path may be that outside of it: then its own group is the root.
            own = root / path.lstrip("/")
            around = (group for group in (own, *own.parents) if group.is_relative_to(root))
            yield from ((group, 1 if controllers else 2) for group in around)


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip()
