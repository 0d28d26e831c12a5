"""Which checks there are for a plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from surogate_core.errors import PluginError
from surogate_core.plugins import Registry, import_policy, load_plugins
from surogate_core.testing.check import Check


def checks(plugin: str, registry: Registry | None = None) -> list[Check]:
    """Every check of an installed plugin, by the name of its entry point or of its distribution.

    `registry`: loaded plugins; by default those that the environment's policy lets in. Raises `PluginError` when the
    plugin is not there, may not be imported, or cannot be.
    """
    registry = load_plugins(import_policy()) if registry is None else registry
    blocked = {name: f"{p.label} is {reason}" for name, (p, reason) in registry.blocked.items()}
    failed = {name: str(broken) for name, broken in registry.broken.items()}
    for name, reason in (blocked | failed).items():
        owner = registry.broken[name].plugin if name in failed else registry.blocked[name][0]
        if plugin in (name, owner.distribution):
            raise PluginError(f"{reason}.")
    found = [p for p in registry.plugins.values() if plugin in (p.name, p.distribution)]
    if not found:
        raise PluginError(f"plugin {plugin} is not installed. `surogate plugins list` lists what is.")
    from surogate_core.testing import general

    listed: list[Check] = []
    for one in found:
        for function in general.CHECKS if one.entry_point is not None else ():
            run = partial(function, one, registry)
            listed.append(Check(subject=f"plugin {one.name}", title=_title(function), run=run))
        for kind, suite in _suites(registry).items():
            for name, offered in registry.bundles(kind).items():
                if offered.plugin.name == one.name:
                    subject = f"{kind} {name}"
                    listed += [Check(subject=subject, title=_title(f), run=partial(f, offered.bundle)) for f in suite]
    return listed


def _suites(registry: Registry) -> dict[str, Sequence[Callable[[Any], None]]]:
    from surogate_core.testing import (
        datasets,
        kernels,
        launchers,
        models,
        monitors,
        objectives,
        offloaders,
        optimizers,
        recipes,
        weight_formats,
    )

    return {
        "model": (*models.CHECKS, models.trains_with(registry.all("recipe"))),
        "objective": objectives.CHECKS,
        "recipe": recipes.CHECKS,
        "quant": weight_formats.CHECKS,
        "optimizer": optimizers.CHECKS,
        "dataset": datasets.CHECKS,
        "monitor": monitors.CHECKS,
        "kernels": kernels.CHECKS,
        "offload": offloaders.CHECKS,
        "launcher": launchers.CHECKS,
    }


def _title(function: Callable[..., None]) -> str:
    return function.__name__.replace("_", " ")
