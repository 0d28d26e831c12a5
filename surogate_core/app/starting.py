"""Starts the run of a composed configuration, for the command line and for Python."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from surogate_core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from surogate_core.app.arguments import Arguments
    from surogate_core.config.schema import RunConfig
    from surogate_core.plugins.registry import Registry
    from surogate_core.run.watch import Watch

NO_EXTENSIONS = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYDANTIC_DISABLE_PLUGINS": "__all__"}
"""torch and pydantic import every entry point of their groups, before a lock is compared; no run needs one."""


def require_own_data(arguments: Arguments, task: str | None, configs: Sequence[RunConfig], registry: Registry) -> None:
    """Raise `ConfigError` if the user's own model would be trained on the example without the user asking for it."""
    from surogate_core.config.resolve import gather

    reading = (config for config in configs if registry.get("task", config.task).needs_data)
    model = next((config.model.path for config in reading if config.model.path is not None), None)
    if model is None:
        return
    multirun, file = arguments.multirun, arguments.config_file
    settings = gather(arguments.overrides, task=task, config_file=file, registry=registry, multirun=multirun)
    named = any(value.key.startswith("datasets") for value in settings.values)
    # An option of the user's own may name the data too.
    if "dataset" in settings.choices or named or settings.where("datasets"):
        return
    message = f"no data set is named, and the default is a toy example that {model} should not learn."
    fix = "datasets=my.jsonl, or dataset=embedded to train on the example"
    raise ConfigError([Problem(key="datasets", message=message, fix=fix)])


def start(config: RunConfig, registry: Registry, watch: Watch | None = None) -> int:
    """Open the run's log and train; `watch`: what the caller adds to the run's monitors."""
    from surogate_core import logs
    from surogate_core.run.job import is_follower, launch, open_run_log
    from surogate_core.run.place import placed

    logs.configure()
    if is_follower(config):
        return launch(config, registry, watch)
    with placed(config) as (config, place):
        for note in filter(None, (place.note, _left_out(registry))):
            print(note, file=sys.stderr, flush=True)
        open_run_log(config)
        code = launch(config, registry, watch)
        if code == 0:
            place.done()
        return code


def _left_out(registry: Registry) -> str:
    """A note about the default monitors that are not installed; empty if all are, or if others are named."""
    from surogate_core.plugins.catalogue import install_command

    if not registry.left_out:
        return ""
    names = ", ".join(registry.left_out)
    fix = install_command(*registry.left_out.values())
    registry.left_out.clear()  # The runs of a sweep say it once.
    return f"note: without the default monitors {names}, which are not installed. Fix: {fix}"
