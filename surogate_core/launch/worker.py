"""One rank of a run that the supervisor has started, as a process of its own."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.parents import die_with

if TYPE_CHECKING:
    from surogate_core.mesh.lifeline import Tied
    from surogate_core.mesh.mesh import Mesh

JOB, STORE, PULSES, OUTCOME, STACKS = "job.json", "store", "pulses", "outcome-{}.json", "stacks-{}.txt"
"""Files of the directory that the supervisor and its workers share."""
SHARED = re.compile(r"job\.json|store|pulses|outcome-\d+\.(json|part)|stacks-\d+\.txt")
"""The names of all of these files, also of one that is half-written."""

DONE, REFUSED, PLUGIN, BUG = "done", "refused", "plugin", "bug"
"""Kinds of outcome: the work returned a code, raised an error of the input, the machine or a plugin, or had a bug."""


def main(arguments: list[str]) -> int:
    """Run the rank; its exit code. The outcome file has the result or the error.

    `arguments`: the directory shared with the supervisor, the rank, the descriptor of the pipe with news, the
    supervisor's process.
    """
    directory, rank = Path(arguments[0]), int(arguments[1])
    die_with(int(arguments[3]))
    # Until the run handles it, Ctrl-C ends this process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stacks = (directory / STACKS.format(rank)).open("w", encoding="utf-8")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    if rank:
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            stream.reconfigure(line_buffering=True)  # into a log, which may have to explain a sudden death
    given = json.loads((directory / JOB).read_bytes())
    sys.path[:] = given["path"]
    from surogate_core.mesh.lifeline import Tied

    world: int = given["world"]
    lifeline = Tied(rank, directory / PULSES, int(arguments[2]), first=given["first"])
    outcome = partial(_write_outcome, directory / OUTCOME.format(rank))
    try:
        module, _, name = given["job"].partition(":")
        job = getattr(importlib.import_module(module), name).from_json(given["values"])
        code = int(job.run(rank=rank, world=world, mesh=partial(_mesh, directory, rank, given, lifeline)))
    except BaseException as error:
        shown = lifeline.cause_of(error)
        lifeline.over()
        return _failed(shown, outcome)
    lifeline.over()
    outcome(kind=DONE, code=code)
    return code


def _mesh(directory: Path, rank: int, given: Mapping[str, Any], lifeline: Tied) -> Mesh:
    from surogate_core.mesh.mesh import Mesh

    world = given["world"]
    if world == 1:
        return Mesh(lifeline=lifeline)
    if given["here"] < world:
        from surogate_core.launch.ranks import joined, rank_of

        found = rank_of(os.environ)
        assert found is not None, "the supervisor sets RANK and WORLD_SIZE"
        mesh = joined(found)
        mesh.lifeline = lifeline
        return mesh
    from torch.distributed import FileStore

    store = FileStore(str(directory / STORE), world)
    return Mesh(rank=rank, world=world, store=store, local_world=world, lifeline=lifeline)


def _failed(error: BaseException, outcome: Any) -> int:
    from surogate_core.errors import PluginError, SurogateError
    from surogate_core.logs import record_traceback
    from surogate_core.plugins.isolation import bug_text

    if isinstance(error, SurogateError):
        kind = PLUGIN if isinstance(error, PluginError) else REFUSED
        outcome(kind=kind, code=error.exit_code, message=str(error))
        return error.exit_code
    outcome(kind=BUG, code=1, message=bug_text(error, record_traceback("a bug ended the rank", error)))
    return 1


def _write_outcome(file: Path, *, kind: str, code: int, message: str = "") -> None:
    values = {"kind": kind, "code": code, "message": message, "at": time.monotonic()}
    beside = file.with_suffix(".part")
    with contextlib.suppress(OSError):  # a full disk: the exit code says it too
        beside.write_text(json.dumps(values), encoding="utf-8")
        beside.replace(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
