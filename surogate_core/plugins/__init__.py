"""Plugins: discovery, policy, loading, and what they offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surogate_core.plugins.discovery import InstalledPlugin, import_policy, installed_plugins
    from surogate_core.plugins.registry import Registry, load_plugins, model_families

__all__ = ["InstalledPlugin", "Registry", "import_policy", "installed_plugins", "load_plugins", "model_families"]


def __getattr__(name: str) -> Any:
    # The modules are imported on first use: `surogate --help` needs none of the registry.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from surogate_core.plugins import discovery, registry

    return getattr(discovery, name, None) or getattr(registry, name)
