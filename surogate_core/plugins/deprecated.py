"""Public names that the core will drop, and the plugins that still use them, found in their sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from surogate_core import API_VERSION
from surogate_core.plugins.discovery import InstalledPlugin
from surogate_core.plugins.static import last_name, locate

SURFACE = "surogate_core.plugin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deprecated:
    """A public name that has a replacement."""

    use: str
    """The replacement, as a plugin writes it."""
    since: int
    """The version of the hook API in which it was deprecated. The version after it still has the name."""

    @property
    def dropped(self) -> int:
        """The version of the hook API that no longer has it."""
        return self.since + 2


DEPRECATED: Mapping[str, Deprecated] = {}
"""Public name → what comes after it: ``name`` of `surogate_core.plugin`, ``module.name`` of one of its modules, or
``Class.field``, a keyword of a bundle.
"""


def deprecations(plugin: InstalledPlugin) -> Iterator[str]:
    """A sentence for each deprecated name that the plugin's sources use; nothing is imported."""
    if not DEPRECATED or plugin.entry_point is None:
        return
    package = locate(plugin.module.partition(":")[0].partition(".")[0])
    files = [] if package is None else sorted(package.rglob("*.py")) if package.is_dir() else [package]
    used = {name for file in files for name in _used(file)}
    for name in sorted(used & DEPRECATED.keys()):
        known = DEPRECATED[name]
        yield f"uses {name} of {SURFACE}, which hook API {known.dropped} drops (this is {API_VERSION}): use {known.use}"


def _used(file: Path) -> Iterator[str]:
    """Public names that a file uses, in the forms of `DEPRECATED`."""
    try:
        text = file.read_text(encoding="utf-8")
        if not any(name.rpartition(".")[2] in text for name in DEPRECATED):
            return
        nodes = list(ast.walk(ast.parse(text)))
    except (OSError, SyntaxError, ValueError):
        return
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == SURFACE]
    public = {alias.asname or alias.name: alias.name for node in imports for alias in node.names}
    yield from public.values()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in public:
            yield f"{public[node.value.id]}.{node.attr}"
        if isinstance(node, ast.Call):
            yield from (f"{last_name(node.func)}.{keyword.arg}" for keyword in node.keywords)
