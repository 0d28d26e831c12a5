"""Which plugins are installed, and which of them may be imported: metadata only, nothing is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING

from surogate_core.plugins.policy import LockRule, as_policy, system_policy

if TYPE_CHECKING:
    from surogate_core.config.schema import PluginPolicy

GROUP = "surogate"
"""The entry-point group that plugins register under."""

CORE_DISTRIBUTION = "surogate-core"
"""The distribution of the core, which every plugin requires."""

CORE = "core"
"""Name of the plugin that holds the core's own built-ins; never blocked."""

BLOCK_VARIABLE = "SUROGATE_PLUGINS_BLOCK"
ALLOW_VARIABLE = "SUROGATE_PLUGINS_ALLOW"
POLICY_VARIABLE = "SUROGATE_PLUGINS_POLICY"
LOCK_VARIABLE = "SUROGATE_PLUGINS_LOCK"
EDITABLE_VARIABLE = "SUROGATE_PLUGINS_ALLOW_EDITABLE"

DEFAULT_LOCK = "surogate.lock"
"""The lock where none is named, in the working directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPlugin:
    """One entry point of group ``surogate``."""

    name: str
    """Name of the entry point; what a policy names."""
    module: str
    """The entry point's value, e.g. ``surogate_recipe_bf16``."""
    distribution: str
    version: str
    entry_point: EntryPoint | None = field(default=None, repr=False, compare=False)
    """None for the core's own plugin."""

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"plugin {self.name} (distribution {self.distribution} {self.version})"

    @property
    def requires(self) -> tuple[str, ...]:
        """The distribution's requirements as written in its metadata."""
        dist = self.entry_point.dist if self.entry_point is not None else None
        return tuple(dist.requires or ()) if dist is not None else ()


def canonical(name: str) -> str:
    """The name without differences that readers overlook: case, and which of ``-_.`` separates words (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def core_plugin() -> InstalledPlugin:
    """The core itself, as a plugin."""
    from surogate_core import __version__

    return InstalledPlugin(
        name=CORE, module="surogate_core.builtin", distribution=CORE_DISTRIBUTION, version=__version__, entry_point=None
    )


def installed_plugins() -> tuple[InstalledPlugin, ...]:
    """Every installed plugin, sorted by entry-point name, then distribution."""
    found = {
        InstalledPlugin(
            name=ep.name,
            module=ep.value,
            distribution=ep.dist.name if ep.dist is not None else "unknown",
            version=ep.dist.version if ep.dist is not None else "unknown",
            entry_point=ep,
        )
        for ep in entry_points(group=GROUP)
    }
    return tuple(sorted(found, key=lambda p: (p.name, p.distribution, p.module)))


def unmet_requirements(plugin: InstalledPlugin) -> tuple[str, ...]:
    """The plugin's requirements that this environment does not meet, each with what is there instead."""
    from packaging.requirements import InvalidRequirement, Requirement

    unmet = []
    for text in plugin.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            unmet.append(f"{text} (not a valid requirement)")
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            has = version(requirement.name)
        except PackageNotFoundError:
            unmet.append(f"{requirement} (not installed)")
            continue
        if not requirement.specifier.contains(has, prereleases=True):
            unmet.append(f"{requirement} (version {has} is installed)")
    return tuple(unmet)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPolicy:
    """What may be imported, by the configuration, the environment and the machine's owner; all must agree."""

    block: Mapping[str, str] = field(default_factory=dict)
    """Blocked entry-point name → where that is said; case, dashes, underscores and dots do not matter."""
    allow: tuple[tuple[str, frozenset[str]], ...] = ()
    """Allow lists: (where it is said, names as they are written); a plugin must be in every one."""
    locks: tuple[LockRule, ...] = ()
    """Locks that what may be imported must equal."""

    def refusal(self, name: str) -> str | None:
        """Why the plugin may not be imported, or None."""
        for blocked, where in self.block.items():
            if canonical(blocked) == canonical(name):
                return f"blocked by {where}"
        for where, names in self.allow:
            if name not in names:
                return f"not in {where}"
        return None


def import_policy(policy: PluginPolicy | None = None, environ: Mapping[str, str] | None = None) -> ImportPolicy:
    """The policies of the configuration, the environment and the machine, joined: each can only forbid.

    Raises `UserError` when the environment's or the machine's is not sound.
    """
    environ = os.environ if environ is None else environ
    block: dict[str, str] = {}
    allow: list[tuple[str, frozenset[str]]] = []
    locks: list[LockRule] = []
    system = system_policy()
    if system is not None:
        block.update(dict.fromkeys(system.block, system.file))
        if system.policy == "allowlist":
            allow.append((f"`allow` of {system.file}", frozenset(system.allow)))
        elif system.policy == "locked":
            locks.append(LockRule(where=system.file, file=system.lock, allow_editable=system.allow_editable))
    block.update(dict.fromkeys(_names(environ.get(BLOCK_VARIABLE, "")), BLOCK_VARIABLE))
    asked = as_policy(environ.get(POLICY_VARIABLE) or "open", POLICY_VARIABLE)
    if asked == "allowlist" or ALLOW_VARIABLE in environ:
        allow.append((ALLOW_VARIABLE, frozenset(_names(environ.get(ALLOW_VARIABLE, "")))))
    if asked == "locked":
        # The configuration's `lock` and `allow_editable` do not apply: a configuration from someone else could loosen
        # it.
        editable = environ.get(EDITABLE_VARIABLE, "").lower() in ("1", "true")
        file = environ.get(LOCK_VARIABLE) or DEFAULT_LOCK
        locks.append(LockRule(where=POLICY_VARIABLE, file=file, allow_editable=editable))
    if policy is not None:
        block.update(dict.fromkeys(policy.block, "plugins.block"))
        if policy.policy == "allowlist":
            allow.append(("plugins.allow", frozenset(policy.allow)))
        elif policy.policy == "locked":
            locks.append(LockRule(where="plugins.policy", file=policy.lock, allow_editable=policy.allow_editable))
    return ImportPolicy(block=block, allow=tuple(allow), locks=tuple(locks))


def _names(text: str) -> list[str]:
    return [name for name in text.replace(",", " ").split() if name]
