"""Plugins: discovery, policy, loading, and what they offer."""

from surogate_core.plugins.discovery import InstalledPlugin, import_policy, installed_plugins
from surogate_core.plugins.registry import Registry, load_plugins, model_families

__all__ = ["InstalledPlugin", "Registry", "import_policy", "installed_plugins", "load_plugins", "model_families"]
