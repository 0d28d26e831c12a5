"""What must hold of a plugin before it is imported: the hook API it was written for, the locks of the policy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core import API_VERSION
from surogate_core.errors import PluginError
from surogate_core.plugins.discovery import ImportPolicy, InstalledPlugin, canonical
from surogate_core.plugins.static import module_api

if TYPE_CHECKING:
    from surogate_core.plugins.lock import Difference

UNSTATED = ">=1,<2"
"""The range of a plugin that states none: the versions that there were when it could not."""


def supported_api(plugin: InstalledPlugin) -> str:
    """The range of hook API versions that the plugin was written for: `SUROGATE_API` in its source."""
    stated = module_api(plugin.module)
    return UNSTATED if stated is None else stated


def incompatible(plugin: InstalledPlugin, api: int = API_VERSION) -> str | None:
    """Why the plugin cannot be used with that version of the hook API, or None."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    if plugin.entry_point is None:
        return None
    stated = supported_api(plugin)
    try:
        fits = SpecifierSet(stated).contains(str(api))
    except InvalidSpecifier:
        return f"refused: its SUROGATE_API is {stated!r}, not a range such as '{UNSTATED}'"
    return None if fits else f"refused: it was written for hook API {stated}, and this surogate has version {api}"


def verify(policy: ImportPolicy, found: Sequence[InstalledPlugin]) -> None:
    """Raise `PluginError` with every difference between the locks of a policy and what may be imported under it."""
    if policy.locks or policy.allow:
        # Hydra would import every module of this namespace, which any distribution can add to.
        sys.modules.setdefault("hydra_plugins", None)  # type: ignore[arg-type]
    problems = []
    for rule in policy.locks:
        lines = rule_differences(policy, found, file=Path(rule.file), allow_editable=rule.allow_editable)
        problems += [f"{line} ({Path(rule.file).absolute()}, asked for by {rule.where})" for line in lines]
    if problems:
        listed = "\n".join(f"  - {p}" for p in dict.fromkeys(problems))
        raise PluginError(
            f"the installed plugins are not the locked ones, so none was imported:\n{listed}\n"
            "Fix: install the locked set, or review the changes and write a new lock: surogate plugins lock"
        )


def rule_differences(
    policy: ImportPolicy, found: Sequence[InstalledPlugin], *, file: Path, allow_editable: bool
) -> list[Difference]:
    """The differences between a lock and what a policy lets in."""
    from surogate_core.plugins.lock import differences, installed_lock, read_lock

    lock = read_lock(file)
    let_in = [p for p in found if policy.refusal(p.name) is None]
    kept_out = {
        name for name, d in lock.distributions.items() if all(policy.refusal(point) for point in d.entry_points)
    }
    named = {canonical(p.distribution) for p in let_in}
    # All entry points of a distribution count: a lock has them all.
    installed = installed_lock((p for p in found if canonical(p.distribution) in named), lock.scope)
    return differences(lock, installed, allow_editable=allow_editable, may_lack=kept_out)
