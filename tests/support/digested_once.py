"""A run records the digests of its plugins. The files of the plugins that are installed here do not change in a
session, so that they are read once for all runs; what a test installs is read each time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from surogate_core.plugins.discovery import InstalledPlugin
from surogate_core.plugins.registry import Registry


def _place(plugin: InstalledPlugin) -> str:
    """Where its distribution is installed; that of the core, which has no entry point, is where pytest is."""
    dist = plugin.entry_point.dist if plugin.entry_point is not None else None
    return pytest.__file__.rpartition("/pytest/")[0] if dist is None else str(dist.locate_file("")).rstrip("/")


@contextmanager
def digested_once() -> Iterator[None]:
    """Let the registries of this process share the digests of installed plugins."""
    places = frozenset(sys.path)
    known: dict[tuple[tuple[str, str, str], ...], list[dict[str, str]]] = {}
    plugin_set = Registry.plugin_set

    @functools.wraps(plugin_set)
    def shared(self: Registry, *, digests: bool = False) -> list[dict[str, str]]:
        key = tuple((plugin.distribution, plugin.version, _place(plugin)) for _, plugin in sorted(self.plugins.items()))
        if not digests or not all(place in places for _, _, place in key):
            return plugin_set(self, digests=digests)
        if key not in known:
            known[key] = plugin_set(self, digests=True)
        return [dict(facts) for facts in known[key]]

    Registry.plugin_set = shared  # type: ignore[method-assign]
    try:
        yield
    finally:
        Registry.plugin_set = plugin_set  # type: ignore[method-assign]
