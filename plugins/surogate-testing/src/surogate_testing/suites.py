"""The checks for a plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from surogate_core.plugin import PluginError, bundles, import_policy, load_plugins
from surogate_core.service.plugins import Registry, locate
from surogate_testing import guard
from surogate_testing.check import Check

APART = frozenset({"monitor", "launcher"})
"""Kinds whose checks run in a child process: they compute nothing, and may end or block a process."""

_MODULES = {
    "objective": "objectives",
    "task": "tasks",
    "advantage": "advantages",
    "policy_loss": "policy_losses",
    "recipe": "recipes",
    "quant": "weight_formats",
    "optimizer": "optimizers",
    "schedule": "schedules",
    "dataset": "datasets",
    "monitor": "monitors",
    "offload": "offloaders",
    "rollout": "rollouts",
    "tool_parser": "tool_parsers",
    "export": "exports",
    "eval": "evaluators",
    "environment": "environments",
    "launcher": "launchers",
    "fabric": "fabrics",
    "report": "reports",
    "command": "commands",
}
"""Kind → the module of its checks."""


def checks(plugin: str, registry: Registry | None = None) -> list[Check]:
    """Every check of an installed plugin, by the name of its entry point or of its distribution.

    `registry`: loaded plugins; by default those that the environment's policy allows. Raises `PluginError` when the
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
    from surogate_testing import general

    listed: list[Check] = []
    for one in found:
        package = locate(one.module.partition(":")[0].partition(".")[0]) if one.entry_point is not None else None
        for function in general.CHECKS if one.entry_point is not None else ():
            run = partial(function, one, registry)
            listed.append(Check(subject=f"plugin {one.name}", title=_title(function), call=run, package=package))
        for kind in bundles.KINDS:
            for offered in registry.bundles(kind).values():
                if offered.plugin.name == one.name:
                    listed += bundle_checks(kind, offered.bundle, registry=registry, package=package)
    return listed


def bundle_checks(
    kind: str,
    bundle: Any,
    *,
    registry: Registry | None = None,
    families: Mapping[str, bundles.ModelFamily] | None = None,
    package: Path | None = None,
) -> list[Check]:
    """Every check of one bundle.

    `registry`: the plugins whose recipes train a model family, and with which it runs. `families`: those whose ops a
    kernel pack may serve, by default the registry's. `package`: the plugin's file or directory, whose lines are named.
    """
    if families is None:
        families = registry.all("model") if registry is not None and kind == "kernels" else {}
    suite = _suite(kind, bundle, registry, families)
    apart = kind in APART
    return [
        Check(
            subject=f"{kind} {bundle.name}",
            title=_title(function),
            call=partial(function, bundle),
            package=package,
            apart=apart,
            seconds=guard.SECONDS_APART if apart else guard.SECONDS,
        )
        for function in suite
    ]


def _suite(
    kind: str, bundle: Any, registry: Registry | None, families: Mapping[str, bundles.ModelFamily]
) -> Sequence[Callable[[Any], None]]:
    defines: Sequence[Callable[[Any], None]] = ()
    if kind in ("model", "kernels") and bundle.ops:
        from surogate_testing.own_ops import defines_its_ops

        defines = (defines_its_ops,)
    if kind == "model":
        from surogate_testing import config_keys, experts, model_adapters, model_blocks, model_runs, models

        trains = models.trains_with({} if registry is None else registry.all("recipe"))
        own = (*models.CHECKS, *config_keys.CHECKS, *model_adapters.CHECKS, *model_blocks.CHECKS, *model_runs.CHECKS)
        runs = model_runs.runs_with(registry)
        return (*defines, *own, runs, trains, *experts.checks_of(bundle))
    if kind == "kernels":
        from surogate_testing import kernels

        return (*defines, *kernels.checks_beside(families.values()))
    suite: Sequence[Callable[[Any], None]] = import_module(f"surogate_testing.{_MODULES[kind]}").CHECKS
    return suite


def _title(function: Callable[..., None]) -> str:
    return function.__name__.replace("_", " ")
