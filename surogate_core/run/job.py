"""A run as data, for the processes that a launcher starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core import logs, set_up_times
from surogate_core.bundles.handed import whole
from surogate_core.config import sharing
from surogate_core.config.resolve import config_from, policy_from, to_dict
from surogate_core.errors import ConfigError, PluginError, Problem, UserError
from surogate_core.imports import quick_import, quick_import_tracing
from surogate_core.launch.ranks import joined, rank_of
from surogate_core.mesh.mesh import Mesh
from surogate_core.plugins.discovery import import_policy
from surogate_core.plugins.registry import Registry, load_plugins
from surogate_core.run.place import placed
from surogate_core.run.watch import Watch

if TYPE_CHECKING:
    from surogate_core.bundles.handed import Plugins
    from surogate_core.config.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """All that a process needs to take part in a run. Plain values only, so it can be pickled or written as JSON."""

    config: Mapping[str, Any]
    """The checked configuration: flat keys to JSON values, as in the run's ``config.yaml``."""
    plugins: tuple[tuple[str, str], ...]
    """(name, version) of the plugins that the launching process has loaded, sorted."""
    watch: Watch = field(default_factory=Watch, compare=False, repr=False)
    """What the launching process adds to the monitors; a copy in another process has no callbacks."""

    @classmethod
    def of(cls, config: RunConfig, registry: Registry, watch: Watch | None = None) -> RunJob:
        """The job of a checked configuration."""
        return cls(config=to_dict(config), plugins=_versions(registry), watch=watch or Watch())

    @property
    def task(self) -> str:
        """Name of the task that makes the steps."""
        return str(self.config["task"])

    def to_json(self, *, resume: bool = False, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """As `bundles.Job.to_json`."""
        if self.watch.callbacks:
            message = "they run in the process that trains, and this run trains in processes of their own."
            raise ConfigError([Problem(key="callbacks", message=message, fix="gpus=1, or a monitor in a plugin")])
        config = {**self.config, **(changes or {})} | ({"resume_from_checkpoint": True} if resume else {})
        return {"config": config, "plugins": [list(plugin) for plugin in self.plugins], "quiet": self.watch.quiet}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunJob:
        """The job from what `to_json` returned."""
        plugins = tuple((name, version) for name, version in values["plugins"])
        return cls(config=values["config"], plugins=plugins, watch=Watch(quiet=values["quiet"]))

    def run(
        self,
        *,
        rank: int = 0,
        world: int = 1,
        registry: Plugins | None = None,
        mesh: Callable[[], Mesh] | None = None,
    ) -> int:
        """As `bundles.Job.run`.

        A process of its own loads the same plugins as the launching process; it raises `PluginError` where they are
        not the same. Only rank 0 locks the output directory and writes to it, except for the logs.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        fresh = registry is None
        known = self._load_plugins() if registry is None else whole(Registry, registry)
        config = config_from(self.config, known)
        if world == 1 and config.gpus > 1:
            message = f"launcher={config.launcher.name} started one process for {config.gpus} GPUs."
            raise ConfigError([Problem(key="gpus", message=message, fix="launcher=local, or gpus=1")])
        config = replace(config, gpus=world)
        sharing.check(config, known.get("optimizer", config.optimizer.name))
        set_up_times.turn_to("importing torch")
        quick_import("surogate_core.setup.assemble")
        from surogate_core.engine.device_memory import wake_gpu
        from surogate_core.setup.assemble import resolve_offloader

        if world == 1 and config.device != "cpu":
            wake_gpu()  # one of several processes may not know its GPU yet
        resolve_offloader(config, known)  # before there is a lock and a report
        met = mesh() if mesh is not None else _met(world)
        # Under torchrun, only rank 0 gives a run without `output_dir` its directory.
        place = met.gather(config.output_dir)[0]
        config = replace(config, output_dir=config.output_dir or place)
        if rank and self.watch.placed is not None:
            self.watch.placed(config.place)
        if fresh or rank:
            open_run_log(config, rank)
        set_up_times.turn_to("importing the trainer")
        quick_import("surogate_core.run.run")
        quick_import_tracing()  # the layers are traced soon
        from surogate_core.run.run import train

        code = train(config, known, watch=self.watch, mesh=met)
        # After an error nothing is closed: that would wait for the other ranks.
        met.close()
        return code

    def _load_plugins(self) -> Registry:
        logs.configure()
        registry = load_plugins(import_policy(policy_from(self.config)))
        if (found := _versions(registry)) != self.plugins:
            differing = ", ".join(" ".join(plugin) for plugin in sorted({*found} ^ {*self.plugins}))
            raise PluginError(
                f"this process has other plugins than the one that launched it: {differing}. "
                f"Fix: install the same plugins in the same versions for both."
            )
        return registry


def launch(config: RunConfig, registry: Registry, watch: Watch | None = None) -> int:
    """Start the run's processes as `launcher` says; the exit code. Without `output_dir` it gets a directory first."""
    launcher = registry.get("launcher", config.launcher.name)
    if is_follower(config):
        return int(launcher.launch(RunJob.of(config, registry, watch), config.launcher.options, registry))
    with placed(config) as (config, place):
        if watch is not None and watch.placed is not None:
            watch.placed(config.place)
        code = int(launcher.launch(RunJob.of(config, registry, watch), config.launcher.options, registry))
        if code == 0:
            place.done()
        return code


def is_follower(config: RunConfig) -> bool:
    """Whether torchrun or SLURM started this process as another rank than 0, which has no outputs of its own."""
    if config.launcher.name != "local":
        return False
    found = rank_of(os.environ)
    return found is not None and found.rank > 0


def open_run_log(config: RunConfig, rank: int = 0) -> None:
    """Write this process's log to `log_file`, or into the output directory; raises `ConfigError` if it cannot.

    Ranks other than 0 have files of their own in the output directory.
    """
    named = config.log_file if rank == 0 else None
    file = Path(named) if named else Path(config.place) / ("surogate.log" if rank == 0 else f"surogate.rank-{rank}.log")
    try:
        logs.open_log(file, follow=named is not None)
    except OSError as error:
        key = "log_file" if named else "output_dir"
        message = f"{file} cannot be written: {error.strerror}."
        raise ConfigError([Problem(key=key, message=message, fix=f"{key}=DIRECTORY_YOU_MAY_WRITE")]) from None


def _met(world: int) -> Mesh:
    """The mesh of a process that another launcher has started."""
    if world == 1:
        return Mesh()
    found = rank_of(os.environ)
    if found is None:
        raise UserError(
            f"{world} processes, but no way to meet. Fix: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    return joined(found)


def _versions(registry: Registry) -> tuple[tuple[str, str], ...]:
    return tuple((plugin["name"], plugin["version"]) for plugin in registry.plugin_set())
