"""Starts a benchmark's ranks, one process a GPU, and collects their results.

A script calls `begin` for each group of ranks, then `Group.go` and `Group.wait`. The ranks run the same script, which
calls `this_rank` first. A group imports its modules while the group before it is measured, and uses no GPU until `go`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from surogate_core.launch.gpus import VISIBLE, rotated, visible
from surogate_core.mesh import driver
from surogate_core.mesh.mesh import Mesh

if TYPE_CHECKING:
    import torch

VARIABLE = "BENCH_RANK"
"""Environment variable of a rank: its directory, number and world as JSON."""
GRACE = 2.0
"""Seconds that the other ranks have after the first failure, to say what they know."""


def environment(rank: int, world: int, *, cache: Path | None = None) -> dict[str, str]:
    """The environment of a rank: its own GPU first and the others behind it, and its share of the cores.

    `cache`: the directory in which compiled programs are kept.
    """
    found = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if gpus := visible(os.environ):
        found[VISIBLE] = rotated(gpus, rank)
    found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    if cache is not None:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH"):
            found[name] = str(cache / name.lower())
    return found


@dataclass(slots=True, kw_only=True)
class Group:
    """The processes of one world."""

    place: tempfile.TemporaryDirectory[str]
    processes: list[subprocess.Popen[bytes]]

    def go(self) -> None:
        """Let the ranks begin."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(b"go\n")
                process.stdin.close()

    def wait(self, limit: float, *, progress: Callable[[], Any] = lambda: None) -> dict[str, Any]:
        """``{"ranks": […]}`` with what each rank returned, or ``{"error": …, "log": …}``; no process is left.

        `limit`: seconds for all, or until `progress` changes again.
        """
        try:
            failed = self._first_failure(limit, progress)
            if failed is not None:
                time.sleep(GRACE)
        finally:
            self.kill()
        with self.place as place:
            if failed is None:
                return {"ranks": [json.loads(Path(place, f"result-{r}").read_text()) for r in range(self.world)]}
            rank, why = failed
            log = Path(place, f"log-{max(rank, 0)}").read_text(errors="replace")
            said = why or cause(log) or f"exit status {self.processes[rank].returncode}"
            return {"error": said if rank < 0 else f"rank {rank}: {said}", "log": log[-3000:]}

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.processes)

    def _first_failure(self, limit: float, progress: Callable[[], Any]) -> tuple[int, str] | None:
        """(rank, reason if known) of the first failure, with rank -1 if time is up; None if all ranks are done."""
        left, until, before = dict(enumerate(self.processes)), time.monotonic() + limit, progress()
        while left:
            for rank, process in list(left.items()):
                code = process.poll()
                if code is not None and not Path(self.place.name, f"result-{rank}").exists():
                    return rank, f"killed by {signal.Signals(-code).name}" if code < 0 else ""
                if code is not None:
                    del left[rank]
            if (now := progress()) != before:
                until, before = time.monotonic() + limit, now
            if time.monotonic() > until:
                return -1, "took longer than its limit"
            time.sleep(0.02)
        return None

    def kill(self) -> None:
        """End what is left of the group, compilers that it started included."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def begin(
    work: Mapping[str, Any], world: int, *, script: str, cache: Path | None = None, first_gpu: int = 0, threads: int = 0
) -> Group:
    """Start the ranks of a world; they wait for `Group.go`. `work` is what `this_rank` returns in each.

    `first_gpu`: the GPU of rank 0. `threads`: CPU threads of a rank; 0 divides the cores.
    """
    place = tempfile.TemporaryDirectory(prefix="ranks-")
    Path(place.name, "work").write_text(json.dumps(dict(work)))
    processes = []
    for rank in range(world):
        mine = environment(rank + first_gpu, world, cache=cache)
        mine[VARIABLE] = json.dumps([place.name, rank, world])
        if threads:
            mine["OMP_NUM_THREADS"] = str(threads)
        with Path(place.name, f"log-{rank}").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, script],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=mine,
                start_new_session=True,
            )
        processes.append(process)
    return Group(place=place, processes=processes)


def is_rank() -> bool:
    """Whether this process is a rank that `begin` started."""
    return VARIABLE in os.environ


def run_rank(
    function: Callable[[dict[str, Any], Mesh], Any],
    *,
    prepare: Callable[[dict[str, Any]], None] = lambda work: None,
    stdin: IO[str] = sys.stdin,
) -> None:
    """In a rank: wait for `Group.go`, call the function with the work and a mesh, and hand in what it returns.

    `prepare` receives the work before the wait. It must not use a GPU.
    """
    directory, rank, world = json.loads(os.environ.pop(VARIABLE))
    work = json.loads(Path(directory, "work").read_text())
    prepare(work)
    if not stdin.readline():
        os._exit(1)  # the parent is gone
    result = function(work, make_mesh(Path(directory, "store"), rank, world))
    unfinished = Path(directory, f"unfinished-{rank}")
    unfinished.write_text(json.dumps(result))
    unfinished.rename(Path(directory, f"result-{rank}"))
    # Tearing down communicators and graphs is no part of a measurement, and may wait for other ranks.
    sys.stdout.flush()
    os._exit(0)


def cause(log: str) -> str:
    """The line of a log that says why its process failed: the last exception, or the last line."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line).strip() for line in log.splitlines()]
    if any("OutOfMemoryError" in line or "out of memory" in line for line in lines):
        return "out of memory"
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)] or list(
        filter(None, lines)
    )
    return raised[-1][:200] if raised else ""


def connect(mesh: Mesh, fabric: str, device: torch.device) -> None:
    """Connect the ranks by the fabric of this name and no other; it raises if that fails.

    As in a run, there is memory that others write to before and after it.
    """
    if mesh.store is None:
        return
    import torch

    from surogate_core.mesh.offers import FABRICS

    (spec,) = (spec for spec in FABRICS if spec.name == fabric)
    mesh.choose(partial(spec.build, spec.options()), device, FABRICS)
    mesh.zeros(1, torch.float32, device)
    mesh.connect(device)


def count_copies() -> Callable[[], int]:
    """A function that returns how many copies this process has given to the copy engines since this call."""
    copy = driver.copy
    copies: list[int] = []

    def counted(to: int, source: int, nbytes: int, stream: int) -> None:
        copies.append(nbytes)
        copy(to, source, nbytes, stream)

    driver.copy = counted
    return lambda: len(copies)


def make_mesh(store: Path, rank: int, world: int) -> Mesh:
    """The mesh of a rank, which shares the file with the others."""
    if world == 1:
        return Mesh()
    import torch.distributed as dist

    return Mesh(rank=rank, world=world, store=dist.FileStore(str(store), world), local_world=world)
