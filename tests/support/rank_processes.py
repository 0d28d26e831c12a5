"""The processes of ranks on this machine, found by their command lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def workers() -> Iterator[tuple[int, int, int]]:
    """(rank, process, process of its supervisor) of every rank that a supervisor started."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        # Behind the module: the shared directory, the rank, the pipe, the supervisor and an empty word.
        if words[-6:-5] == ["surogate_core.launch.worker"]:
            yield int(words[-4]), int(entry.name), int(words[-2])


def ranks_of(supervisor: int) -> dict[int, int]:
    """Rank → process, of the workers of a command."""
    return {rank: process for rank, process, parent in workers() if parent == supervisor}
