"""Checks of launchers: every rank of the job runs once, and the launcher returns the exit code."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from surogate_core.bundles import Launcher
from surogate_core.errors import MachineError
from surogate_core.plugins import Registry, import_policy, load_plugins
from surogate_core.testing.check import NotApplicable, ensure


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A job that trains nothing: it writes a file for its rank, and ends in the requested way."""

    directory: str
    code: int = 0
    fails: bool = False
    task: str = "sft"

    def run(self, *, rank: int = 0, world: int = 1, registry: Registry | None = None) -> int:
        """Write the file ``RANK of WORLD``; returns the code or raises `RuntimeError`."""
        (Path(self.directory) / f"{rank} of {world}").touch(exist_ok=False)
        if self.fails:
            raise RuntimeError("raised by the conformance kit")
        return self.code


def returns_the_exit_code(launcher: Launcher) -> None:
    """With the options' defaults every rank of the job runs, here or in other processes, and 0 and 3 are returned."""
    plugins = load_plugins(import_policy())
    for code in (0, 3):
        with tempfile.TemporaryDirectory() as directory:
            try:
                found = launcher.launch(Probe(directory=directory, code=code), launcher.options(), plugins)
            except MachineError as error:
                raise NotApplicable(str(error)) from None
            ran = sorted(path.name for path in Path(directory).iterdir())
            ensure(bool(ran), "the job was not run")
            world = int(ran[0].rpartition(" ")[2])
            ensure(ran == sorted(f"{rank} of {world}" for rank in range(world)), f"not every rank ran once: {ran}")
            ensure(found == code, f"the job ended with {code}, and launch returned {found!r}")


def lets_errors_through(launcher: Launcher) -> None:
    """An exception of a job ends the launch with an error or an exit code that is not 0; never with 0."""
    plugins = load_plugins(import_policy())
    with tempfile.TemporaryDirectory() as directory:
        try:
            found = launcher.launch(Probe(directory=directory, fails=True), launcher.options(), plugins)
        except MachineError as error:
            raise NotApplicable(str(error)) from None
        except RuntimeError as error:
            ensure("conformance kit" in str(error), f"another error came out: {error}")
            return
        ensure(found != 0, "the job raised, and launch returned 0")


CHECKS = (returns_the_exit_code, lets_errors_through)
