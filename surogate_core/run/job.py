"""A run as data, for the processes that a launcher starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core import logs
from surogate_core.config.resolve import config_from, policy_from, to_dict
from surogate_core.errors import ConfigError, PluginError, Problem, UserError
from surogate_core.plugins.discovery import import_policy
from surogate_core.plugins.registry import load_plugins
from surogate_core.run.place import placed
from surogate_core.run.watch import Watch

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig
    from surogate_core.plugins.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a process needs to take part in a run. Plain values only, so it can be pickled or written as JSON."""

    config: Mapping[str, Any]
    """The checked configuration: flat keys to JSON values, as in the run's ``config.yaml``."""
    plugins: tuple[tuple[str, str], ...]
    """(name, version) of the plugins that the launching process has loaded, sorted."""
    watch: Watch = field(default_factory=Watch, compare=False, repr=False)
    """What the launching process adds to the monitors; a pickled copy has nothing of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Job, config=self.config, plugins=self.plugins), ()

    @classmethod
    def of(cls, config: RunConfig, registry: Registry, watch: Watch | None = None) -> Job:
        """The job of a checked configuration."""
        return cls(config=to_dict(config), plugins=_versions(registry), watch=watch or Watch())

    @property
    def task(self) -> str:
        """Name of the task that makes the steps."""
        return str(self.config["task"])

    def run(self, *, rank: int = 0, world: int = 1, registry: Registry | None = None) -> int:
        """Run the part of process `rank` of `world`; the exit code. Errors are raised.

        `registry`: the plugins of the launching process, in that process alone. Any other process leaves it out and
        loads the same plugins itself; it raises `PluginError` where they are not the same. Only rank 0 locks the
        output directory and writes to it.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        if world > 1:
            raise UserError(f"{world} processes: a run is one process in this version. Fix: launcher=local")
        fresh = registry is None
        registry = self._load_plugins() if registry is None else registry
        config = config_from(self.config, registry)
        if fresh and rank == 0:
            open_run_log(config)
        from surogate_core.run.run import train

        return train(config, registry, rank=rank, watch=self.watch)

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
    with placed(config) as (config, place):
        launcher = registry.get("launcher", config.launcher.name)
        code = int(launcher.launch(Job.of(config, registry, watch), config.launcher.options, registry))
        if code == 0:
            place.done()
        return code


def open_run_log(config: RunConfig) -> None:
    """Write this process's log to `log_file`, or into the output directory; raises `ConfigError` if it cannot."""
    file = Path(config.log_file) if config.log_file else Path(config.place) / "surogate.log"
    try:
        logs.open_log(file, follow=config.log_file is not None)
    except OSError as error:
        key = "log_file" if config.log_file else "output_dir"
        message = f"{file} cannot be written: {error.strerror}."
        raise ConfigError([Problem(key=key, message=message, fix=f"{key}=DIRECTORY_YOU_MAY_WRITE")]) from None


def _versions(registry: Registry) -> tuple[tuple[str, str], ...]:
    return tuple((plugin["name"], plugin["version"]) for plugin in registry.plugin_set())
