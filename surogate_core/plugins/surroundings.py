"""What runs beside the plugins: the core, the dependencies, and code that libraries or Python start by themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Literal

from surogate_core.plugins.digests import digest_of
from surogate_core.plugins.discovery import CORE_DISTRIBUTION, GROUP, canonical

Scope = Literal["plugins", "core", "dependencies", "environment"]
SCOPES: tuple[Scope, ...] = ("plugins", "core", "dependencies", "environment")

FRONT_DOOR = "surogate"
"""The distribution of the command. It requires the core and the default plugins."""

_UNUSED_GROUPS = frozenset(
    """
    console_scripts gui_scripts distutils.commands distutils.setup_keywords egg_info.writers pipx.run pyinstaller40
    pytest11 hypothesis babel.extractors pkg_config hatch build_backend setuptools.finalize_distribution_options
    markdown.extensions tensorboard_plugins
    """.split()  # noqa: SIM905
)
"""Entry-point groups that only a build tool, a test runner or a shell reads."""


def in_scope(scope: Scope, plugins: Iterable[str]) -> dict[str, Distribution]:
    """Normalised name → each distribution that a scope adds to those of the plugins."""
    if scope == "plugins":
        return {}
    if scope == "environment":
        return {canonical(d.name): d for d in reversed(list(distributions())) if d.name}
    core = {}
    for name in (CORE_DISTRIBUTION, FRONT_DOOR):
        with suppress(PackageNotFoundError):
            core[name] = distribution(name)
    return core if scope == "core" else {**required_by([CORE_DISTRIBUTION, *plugins], _extras_of_core()), **core}


def _extras_of_core() -> list[str]:
    """The extras with which the command's distribution requires the core, such as the server's."""
    from packaging.requirements import Requirement

    try:
        found = [Requirement(text) for text in distribution(FRONT_DOOR).requires or ()]
    except (PackageNotFoundError, ValueError):
        return []
    return [
        extra
        for one in found
        if one.marker is None and canonical(one.name) == CORE_DISTRIBUTION
        for extra in one.extras
    ]


def required_by(names: Iterable[str], extras: Iterable[str] = ()) -> dict[str, Distribution]:
    """Normalised name → the distributions of these names that are installed, and all that they require here.

    `extras`: of the core.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    found: dict[str, Distribution] = {}
    done: set[tuple[str, str]] = set()
    waiting = [*((name, "") for name in names), *((CORE_DISTRIBUTION, extra) for extra in extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        try:
            dist = found.setdefault(name, distribution(name))
        except PackageNotFoundError:
            continue
        for text in dist.requires or ():
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(canonical(requirement.name), wanted) for wanted in ("", *requirement.extras)]
    return found


def installed_twice(names: Iterable[str]) -> Mapping[str, list[str]]:
    """Normalised name → the directories, where the distribution is in more than one directory of `sys.path`."""
    wanted, places = set(names), dict[str, set[str]]()
    for dist in distributions():
        name = canonical(dist.name) if dist.name else ""
        if name in wanted:
            places.setdefault(name, set()).add(str(Path(str(dist.locate_file(""))).resolve()))
    return {name: sorted(found) for name, found in places.items() if len(found) > 1}


def started_code() -> tuple[str, ...]:
    """Code that no plugin policy decides about: each with what starts it, and its digest where it is one file.

    Libraries import the entry points of their groups (``torch.backends``, ``fsspec.specs``). Python runs ``.pth`` files
    with an import line and ``sitecustomize`` before anything else.
    """
    found = set()
    for dist in distributions():
        for point in dist.entry_points:
            if point.group not in _UNUSED_GROUPS and point.group != GROUP:
                found.add(
                    f"entry point {point.group}: {point.name} = {point.value} (distribution {canonical(dist.name)})"
                )
    for entry in dict.fromkeys(sys.path):
        for file in sorted(Path(entry).glob("*.pth")) if entry and Path(entry).is_dir() else ():
            if _imports(file):
                found.add(f"start-up file {file.name}, SHA-256 {digest_of(file)}")
    for name in ("sitecustomize", "usercustomize"):
        # `find_spec` would return the loaded module, and Debian's Python has loaded one of its own.
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.origin:
            found.add(f"start-up module {name}, SHA-256 {digest_of(Path(spec.origin))}")
    return tuple(sorted(found))


def _imports(file: Path) -> bool:
    try:
        lines = file.read_bytes().splitlines() if file.is_file() else []
    except OSError:
        return True
    return any(line.startswith((b"import ", b"import\t")) for line in lines)
