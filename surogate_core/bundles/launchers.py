"""Launchers: how the processes of a run start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from surogate_core.bundles.options import NoOptions

if TYPE_CHECKING:
    from surogate_core.bundles.handed import Plugins


class Job(Protocol):
    """A run as a launcher receives it: data that can be sent to other processes."""

    @property
    def task(self) -> str:
        """Name of the run's task."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The checked configuration: flat keys to JSON values. `gpus` is the number of ranks to start."""

    def to_json(self, *, resume: bool = False, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """JSON values from which the class's `from_json` makes a copy in another process.

        `resume`: the copy continues from the run's latest checkpoint. `changes`: flat keys of its configuration that
        differ from this one's. Raises `ConfigError` if the job has parts that
        cannot leave this process, such as callbacks.
        """

    def run(
        self,
        *,
        rank: int = 0,
        world: int = 1,
        registry: Plugins | None = None,
        mesh: Callable[[], Any] | None = None,
    ) -> int:
        """Run the part of process `rank` of `world` in this process; returns the exit code. Errors are raised.

        `registry`: the argument of `launch`, in the process of the launcher; other processes omit it. `mesh`: connects
        this process with the other ranks; without it they meet at MASTER_ADDR and MASTER_PORT.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A launcher: starts the processes of a run."""

    name: str
    """The value of `launcher`."""
    launch: Callable[[Job, Any, Plugins], int]
    """(job, options, the plugins that this process has loaded) → exit code. Calls `job.run` here, with the plugins, or
    in processes that get a copy of the job; every rank must run, and all processes must be gone, before it returns."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
