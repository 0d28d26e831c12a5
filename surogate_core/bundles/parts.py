"""Parts: the bundles that the options of a task choose by name, such as its policy loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surogate_core.errors import PluginError


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A bundle that a task's options choose, built with its own options."""

    kind: str
    """Kind of the bundle, such as ``policy_loss``."""
    name: str
    """Name of the bundle."""
    options: Any
    """An instance of the bundle's `options`."""
    built: Any
    """What the bundle's `build` returned."""
    plugin: str = ""
    """The plugin that offers it, as messages name it."""

    @property
    def label(self) -> str:
        """How messages name it."""
        return label(self.kind, self.name, self.plugin)


def part_of(kind: str, spec: Any, options: Any = None, *, plugin: str = "") -> Part:
    """The part that a bundle's `build` makes with options; None stands for their defaults.

    Raises `PluginError` when `build` fails.
    """
    options = spec.options() if options is None else options
    try:
        built = spec.build(options)
    except Exception as error:
        raise PluginError(f"{label(kind, spec.name, plugin)} cannot be built: {fault(error)}") from error
    return Part(kind=kind, name=spec.name, options=options, built=built, plugin=plugin)


def label(kind: str, name: str, plugin: str) -> str:
    """How messages name a bundle and the plugin that offers it."""
    return f"{kind.replace('_', ' ')} {name}{f' of {plugin}' if plugin else ''}"


def fault(error: Exception) -> str:
    """What a message says of an exception that a plugin raised."""
    return f"{type(error).__name__}: {str(error).rstrip('.')}."
