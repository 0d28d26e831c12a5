"""Runs on several ranks: rank 0 is the process of the tests, the others are processes that serve one run after another.

``python rank_world.py`` is such a process. It reads a run from each line of its standard input, and answers each with a
line: an exit code or an error.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from surogate_core.config.resolve import load_run_config
from surogate_core.mesh.mesh import Mesh
from surogate_core.plugins.registry import Registry, load_plugins


def mesh_of(file: Path, rank: int, world: int, local_world: int = 0) -> Mesh:
    """The mesh of a rank whose store is in a file. `local_world`: ranks that are said to be on each machine; 0: all."""
    from torch.distributed import FileStore

    return Mesh(rank=rank, world=world, store=FileStore(str(file), world), local_world=local_world or world)


def run_rank(registry: Registry, overrides: list[str], mesh: Mesh) -> int:
    """One rank of a run; its exit code."""
    from surogate_core.run.run import train

    latest = {text.partition("=")[0]: text for text in overrides}
    config = load_run_config([*latest.values(), f"gpus={mesh.world}"], registry=registry)
    try:
        return train(config, registry, mesh=mesh)
    finally:
        mesh.close()


def of_step(run: Path, step: int, to: Path) -> Path:
    """A copy of a run that ended after a step."""
    copy = Path(shutil.copytree(run, to))
    for path in copy.glob("checkpoint-*"):
        if int(path.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(path)
    return copy


class World:
    """A rank 0 that has the others at its service. Worlds of several sizes share the processes."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._others: list[subprocess.Popen[str]] = []
        self.ends: list[Any] = []

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the other processes."""
        for process in self._others:
            process.kill()
            process.communicate()
        self._others = []

    def run(
        self,
        world: int,
        output: Path,
        *overrides: str,
        of_rank: Callable[[int], list[str]] = lambda rank: [],
        of_others: str = "",
        local_world: int = 0,
    ) -> tuple[int, list[Any]]:
        """(exit code of rank 0, how the others end: an exit code or an error); `of_rank` gives more overrides, and the
        other processes execute the source `of_others` first. `local_world`: as for `mesh_of`.

        An error of rank 0 is raised; `ends` then has the exit codes and errors of the others.
        """
        while len(self._others) < world - 1:
            command = [sys.executable, __file__]
            self._others.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment())
            )
        with tempfile.TemporaryDirectory() as directory:
            store = Path(directory) / "store"
            for rank, process in enumerate(self._others[: world - 1], start=1):
                keys = [*overrides, f"output_dir={output}", *of_rank(rank)]
                assert process.stdin is not None
                process.stdin.write(json.dumps([str(store), rank, world, local_world, keys, of_others]) + "\n")
                process.stdin.flush()
            try:
                mesh = mesh_of(store, 0, world, local_world)
                code = run_rank(self._registry, [*overrides, f"output_dir={output}", *of_rank(0)], mesh)
            except BaseException:
                self.ends = [self._answer(process) for process in self._others[: world - 1]]
                raise
            return code, [self._answer(process) for process in self._others[: world - 1]]

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "a rank has died"
        return json.loads(line)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    registry = load_plugins()
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        store, rank, world, local_world, overrides, source = json.loads(line)
        exec(source, {})
        try:
            result: Any = run_rank(registry, overrides, mesh_of(Path(store), rank, world, local_world))
        except BaseException as error:
            traceback.print_exc()
            result = f"{type(error).__name__}: {error}"
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
