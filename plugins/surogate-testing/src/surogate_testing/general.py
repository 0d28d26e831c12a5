"""Checks of every plugin, whatever it offers."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

from surogate_core.plugin import bundles
from surogate_core.service.plugins import HEAVY, InstalledPlugin, Registry, static_view, unmet_requirements
from surogate_testing.check import ensure


def has_what_it_requires(plugin: InstalledPlugin, registry: Registry) -> None:
    """The requirements of its distribution are met here."""
    unmet = unmet_requirements(plugin)
    ensure(not unmet, f"not met: {', '.join(unmet)}")


def imports_quietly(plugin: InstalledPlugin, registry: Registry) -> None:
    """Importing the module imports nothing heavy, prints nothing and starts no thread."""
    code = (
        f"import importlib, sys, threading\nimportlib.import_module({plugin.module.partition(':')[0]!r})\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "sys.exit(f'imports {heavy}' if heavy else 'starts a thread' if threading.active_count() > 1 else 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    ensure(found.returncode == 0, f"the module {(found.stderr or found.stdout).strip().splitlines()[-1:]}")
    ensure(not found.stdout, f"the module prints {found.stdout[:80]!r}")


def answers_quietly(plugin: InstalledPlugin, registry: Registry) -> None:
    """Its hooks print nothing and leave no thread."""
    for kind in bundles.KINDS:
        registry.bundles(kind)
    registry.flat_keys()
    clashes = [str(clash) for clash in registry.clashes.values() if f"plugin {plugin.name} " in clash.message]
    ensure(not clashes, " ".join(clashes))
    said = [r.text for r in registry.remarks if r.plugin.name == plugin.name and "in its hook" in r.text]
    ensure(not said, f"the plugin {'; '.join(said)}")


def is_seen_without_import(plugin: InstalledPlugin, registry: Registry) -> None:
    """What it offers is what `surogate plugins list` reads from its source: names are literals."""
    view = static_view(plugin.module)
    for kind in bundles.KINDS:
        offered = {name for name, o in registry.bundles(kind).items() if o.plugin.name == plugin.name}
        unseen = offered - {name for k, name in view.bundles if k == kind}
        ensure(not unseen, f"{kind} {', '.join(sorted(unseen))}: the name is not a literal in the source")
    ensure(plugin.name not in registry.broken, f"{registry.broken.get(plugin.name)}")


def has_options_with_defaults(plugin: InstalledPlugin, registry: Registry) -> None:
    """Options are frozen dataclasses; those of every kind but data sets have defaults."""
    for kind in bundles.KINDS:
        for name, offered in registry.bundles(kind).items():
            options = getattr(offered.bundle, "options", None)
            if offered.plugin.name != plugin.name or options is None:
                continue
            ensure(dataclasses.is_dataclass(options), f"options of {kind} {name} are no dataclass")
            frozen = options.__dataclass_params__.frozen
            ensure(frozen, f"options of {kind} {name} are not frozen")
            if kind != "dataset":
                options()


CHECKS = (
    has_what_it_requires,
    imports_quietly,
    answers_quietly,
    is_seen_without_import,
    has_options_with_defaults,
)
