"""What must hold of a plugin before it is imported: the hook API it was written for, the locks of the policy."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core import API_VERSION, __version__
from surogate_core.errors import PluginError
from surogate_core.lazy import offered_names
from surogate_core.plugins.discovery import CORE_DISTRIBUTION, ImportPolicy, InstalledPlugin, canonical
from surogate_core.plugins.static import module_api

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from surogate_core.plugins.lock import Difference, Lock

NEWER_CORE = f"pip install -U {CORE_DISTRIBUTION}"
UNSTATED = ">=1,<2"
"""The range of a plugin that states none: the versions that there were when it could not."""
OLDEST = 2
"""The first version of the hook API that a release had."""


def served(api: int = API_VERSION) -> range:
    """The versions of the hook API that a core of version `api` serves: its own, and the one before."""
    return range(max(min(OLDEST, api), api - 1), api + 1)


def supported_api(plugin: InstalledPlugin) -> str | None:
    """The range of hook API versions that the plugin was written for: `SUROGATE_API` in its source.

    None where the source cannot be read; what is wrong with it shows when it is imported.
    """
    try:
        stated = module_api(plugin.module)
    except (OSError, SyntaxError, ValueError):
        return None
    return UNSTATED if stated is None else stated


def incompatible(plugin: InstalledPlugin, api: int = API_VERSION) -> str | None:
    """Why the plugin cannot be used with that version of the hook API, or None."""
    stated = None if plugin.entry_point is None else supported_api(plugin)
    if stated is None:
        return None
    fits = _range(stated)
    if fits is None:
        return f"refused: its SUROGATE_API is {stated!r}, not a range such as '>={api},<{api + 1}'"
    if any(fits.contains(str(version)) for version in served(api)):
        return None
    versions = " and ".join(map(str, served(api)))
    return f"refused: it was written for hook API {stated}, and this surogate has version {versions}"


def outdated(plugin: InstalledPlugin, api: int = API_VERSION) -> str:
    """A sentence about a plugin that was not written for the core's own version but for the one before; else empty."""
    stated = None if plugin.entry_point is None else supported_api(plugin)
    fits = _range(stated) if stated is not None else None
    if fits is None or fits.contains(str(api)) or incompatible(plugin, api) is not None:
        return ""
    return f"was written for hook API {stated}, which hook API {api + 1} drops: pip install -U {plugin.distribution}"


def remedy(plugin: InstalledPlugin, api: int = API_VERSION) -> str:
    """What to do about a plugin that is incompatible."""
    stated = supported_api(plugin)
    fits = _range(stated) if stated is not None else None
    newer = f"Install a version of {plugin.distribution} for hook API {api}: pip install -U {plugin.distribution}"
    if fits is None:
        return f"{newer}."
    is_old = any(fits.contains(str(version)) for version in range(1, api))
    core = f"an older core: {_core_for(plugin)}" if is_old else f"a newer core: {NEWER_CORE}"
    return f"{newer}; or {core}."


def _core_for(plugin: InstalledPlugin) -> str:
    """What installs the core that the plugin requires."""
    for text in plugin.requires:
        requirement, _, marker = text.partition(";")
        found = re.fullmatch(r"([\w.-]+)\s*\(?([^)]*)\)?\s*", requirement.strip())
        if found and canonical(found[1]) == canonical(CORE_DISTRIBUTION) and found[2] and not marker:
            return f"pip install '{CORE_DISTRIBUTION}{found[2].replace(' ', '')}'"
    return f"one of hook API {supported_api(plugin)}; {plugin.distribution} does not say which versions have it"


_UNKNOWN_FIELD = re.compile(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'")
_UNKNOWN_NAME = re.compile(r"cannot import name '(\w+)' from '(surogate_core[\w.]*)'")
_UNKNOWN_ATTRIBUTE = re.compile(r"module '(surogate_core[\w.]*)' has no attribute '(\w+)'")
_UNKNOWN_MODULE = re.compile(r"No module named '(surogate_core[\w.]*)'")


def needs_newer_core(error: BaseException) -> str:
    """What of this core a plugin has asked for in vain, so that it needs a newer one; empty for other errors."""
    text = str(error)
    if isinstance(error, TypeError) and (found := _UNKNOWN_FIELD.search(text)) and _is_public(found[1], error):
        owner = found[1].removesuffix(".__init__")
        what = f"no {'argument' if owner == found[1] else 'field'} {found[2]} of {owner}"
    elif isinstance(error, ImportError) and (found := _UNKNOWN_NAME.search(text)):
        what = f"no {found[1]} in {found[2]}"
    elif isinstance(error, AttributeError) and (found := _UNKNOWN_ATTRIBUTE.search(text)):
        what = f"no {found[2]} in {found[1]}"
    elif isinstance(error, ImportError) and (found := _UNKNOWN_MODULE.search(text)):
        what = f"no module {found[1]}"
    else:
        return ""
    return f"this core, {CORE_DISTRIBUTION} {__version__}, knows {what}; the plugin needs a newer surogate-core"


def _is_public(called: str, error: TypeError) -> bool:
    """Whether a function or a class, as a `TypeError` names it, is one that the core offers to plugins."""
    from surogate_core import plugin

    name, traceback = called.removesuffix(".__init__").partition(".")[0], error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    # A plugin may have a function of that name too. What has been called is in a module that is loaded.
    scopes = [] if traceback is None else [traceback.tb_frame.f_locals, traceback.tb_frame.f_globals]
    offered = offered_names(Path(str(plugin.__file__)).read_text(encoding="utf-8")).values()
    loaded = [sys.modules[full] for module, own in offered if (full := f"{module}.{own}") in sys.modules]
    subjects = [home for home in (plugin, *loaded) if name in getattr(home, "__all__", ())]
    scopes += [{name: getattr(home, name)} for home in subjects] + [vars(home) for home in loaded]
    found = next((scope[name] for scope in scopes if name in scope), None)
    return str(getattr(found, "__module__", "")).startswith("surogate_core.")


def _range(stated: str) -> SpecifierSet | None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(stated)
    except InvalidSpecifier:
        return None


def verify(policy: ImportPolicy, found: Sequence[InstalledPlugin]) -> None:
    """Raise `PluginError` with every difference between the locks of a policy and what may be imported under it."""
    if policy.locks or policy.allow:
        # Hydra would import every module of this namespace, which any distribution can add to.
        sys.modules.setdefault("hydra_plugins", None)  # type: ignore[arg-type]
    problems: list[str] = []
    whole: list[Lock] = []
    for rule in policy.locks:
        installed, lines = compared(policy, found, file=Path(rule.file), allow_editable=rule.allow_editable)
        problems += [f"{line} ({Path(rule.file).absolute()}, asked for by {rule.where})" for line in lines]
        whole += [installed] if installed.scope == "environment" else []
    if problems:
        listed = "\n".join(f"  - {p}" for p in dict.fromkeys(problems))
        raise PluginError(
            f"the installed plugins are not the locked ones, so none was imported:\n{listed}\n"
            "Fix: install the locked set, or review the changes and write a new lock: surogate plugins lock"
        )
    if whole:
        from surogate_core.plugins.lock import importable
        from surogate_core.plugins.loose import refuse_loose

        refuse_loose(importable(whole[0]))


def rule_differences(
    policy: ImportPolicy, found: Sequence[InstalledPlugin], *, file: Path, allow_editable: bool
) -> list[Difference]:
    """The differences between a lock and what a policy lets in."""
    return compared(policy, found, file=file, allow_editable=allow_editable)[1]


def compared(
    policy: ImportPolicy, found: Sequence[InstalledPlugin], *, file: Path, allow_editable: bool
) -> tuple[Lock, list[Difference]]:
    """What a policy lets in, as a lock of its own, and its differences from a lock's file."""
    from surogate_core.plugins.lock import differences, installed_lock, read_lock

    lock = read_lock(file)
    let_in = [p for p in found if policy.refusal(p.name) is None]
    kept_out = {
        name for name, d in lock.distributions.items() if all(policy.refusal(point) for point in d.entry_points)
    }
    named = {canonical(p.distribution) for p in let_in}
    # All entry points of a distribution count: a lock has them all.
    installed = installed_lock((p for p in found if canonical(p.distribution) in named), lock.scope)
    return installed, differences(lock, installed, allow_editable=allow_editable, may_lack=kept_out)
