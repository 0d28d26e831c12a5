"""Checks of launchers: every rank of the job runs once, and the launcher returns the exit code."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surogate_core.plugin import (
    ConfigError,
    MachineError,
    Problem,
    SurogateError,
    UserError,
    bundles,
    import_policy,
    load_plugins,
)
from surogate_testing.check import NotApplicable, ensure


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A job that trains nothing: it writes a file for its rank, and ends in the requested way."""

    directory: str
    gpus: int = 1
    code: int = 0
    fails: int | None = None
    """The rank that raises."""
    task: str = "sft"

    @property
    def config(self) -> Mapping[str, Any]:
        """What a launcher reads of a configuration."""
        place = {"output_dir": self.directory, "checkpoint_dir": None}
        return {"gpus": self.gpus, "device": "cpu", "task": self.task, **place}

    def to_json(self, *, resume: bool = False, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """As `bundles.Job.to_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Probe:
        """The probe from what `to_json` returned."""
        return cls(**values)

    def run(
        self, *, rank: int = 0, world: int = 1, registry: bundles.Plugins | None = None, mesh: object = None
    ) -> int:
        """Write the file ``RANK of WORLD``; returns the code or raises `RuntimeError`."""
        if world < self.gpus:
            raise ConfigError([Problem(key="gpus", message=f"{world} processes for {self.gpus} GPUs.")])
        (Path(self.directory) / f"{rank} of {world}").touch(exist_ok=False)
        if self.fails == rank:
            raise RuntimeError("raised by the conformance kit")
        return self.code


def returns_the_exit_code(launcher: bundles.Launcher) -> None:
    """With the options' defaults every rank of the job runs, here or in other processes, and 0 and 3 are returned."""
    for code in (0, 3):
        _runs_every_rank(launcher, gpus=1, code=code)


def starts_every_rank(launcher: bundles.Launcher) -> None:
    """A job for two GPUs runs as ranks 0 and 1; a launcher of one process refuses it or lets `job.run` refuse it."""
    try:
        _runs_every_rank(launcher, gpus=2, code=0)
    except UserError as error:
        raise NotApplicable(str(error)) from None


def _runs_every_rank(launcher: bundles.Launcher, *, gpus: int, code: int) -> None:
    plugins = load_plugins(import_policy())
    with tempfile.TemporaryDirectory() as directory:
        probe = Probe(directory=directory, gpus=gpus, code=code)
        try:
            found = launcher.launch(probe, launcher.options(), plugins)
        except MachineError as error:
            raise NotApplicable(str(error)) from None
        ran = sorted(path.name for path in Path(directory).iterdir() if path.name != "logs")
        ensure(bool(ran), "the job was not run")
        world = max(int(ran[0].rpartition(" ")[2]), gpus)
        ensure(ran == sorted(f"{rank} of {world}" for rank in range(world)), f"not every rank ran once: {ran}")
        ensure(found == code, f"the job ended with {code}, and launch returned {found!r}")


def lets_errors_through(launcher: bundles.Launcher) -> None:
    """An exception of a job ends the launch with an error or an exit code that is not 0; never with 0."""
    plugins = load_plugins(import_policy())
    with tempfile.TemporaryDirectory() as directory:
        try:
            found = launcher.launch(Probe(directory=directory, fails=0), launcher.options(), plugins)
        except MachineError as error:
            raise NotApplicable(str(error)) from None
        except (SurogateError, RuntimeError) as error:
            ensure("conformance kit" in str(error), f"another error came out: {error}")
            return
        ensure(found != 0, "the job raised, and launch returned 0")


def ends_with_a_failed_rank(launcher: bundles.Launcher) -> None:
    """If rank 1 of two raises, the launch ends with an error or an exit code that is not 0; one process may refuse."""
    plugins = load_plugins(import_policy())
    with tempfile.TemporaryDirectory() as directory:
        try:
            found = launcher.launch(Probe(directory=directory, gpus=2, fails=1), launcher.options(), plugins)
        except (MachineError, UserError) as error:
            raise NotApplicable(str(error)) from None
        except (SurogateError, RuntimeError) as error:
            ensure("conformance kit" in str(error), f"another error came out: {error}")
            return
        ensure(found != 0, "rank 1 raised, and launch returned 0")


CHECKS = (returns_the_exit_code, starts_every_rank, lets_errors_through, ends_with_a_failed_rank)
