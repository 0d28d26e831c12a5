"""What must be the same on all machines of a run."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from surogate_core.plugin import PluginError

if TYPE_CHECKING:
    from surogate_core.plugin import bundles

Installed = Mapping[str, tuple[str, str]]
"""Name of a plugin or program → its version, and the SHA-256 of its files, which may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A machine, as its supervisor describes it."""

    node: str
    """Ray's id."""
    address: str
    host: str
    installed: Installed
    gpus: Sequence[str]
    """What Ray has given the supervisor, as CUDA_VISIBLE_DEVICES lists them."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.host} ({self.address})"


def installed_in(registry: bundles.Plugins) -> dict[str, tuple[str, str]]:
    """The plugins and the core of this process with digests of their files, Python and torch."""
    found = {facts["name"]: (facts["version"], facts.get("sha256", "")) for facts in registry.plugin_set(digests=True)}
    return {**found, "python": (platform.python_version(), ""), "torch": (metadata.version("torch"), "")}


def compare(here: Installed, machines: Sequence[Facts]) -> None:
    """Raise `PluginError` with every difference between this process and the machines."""
    problems = []
    for machine in machines:
        differing = [_difference(name, here.get(name), machine.installed.get(name)) for name in _all(here, machine)]
        if found := [text for text in differing if text]:
            problems.append(f"{machine.name}: {', '.join(found)}")
    if problems:
        raise PluginError(
            f"launcher=ray: not the same is installed everywhere. {'; '.join(problems)}. "
            f"Fix: install the same plugins in the same versions on all machines."
        )


def _all(here: Installed, machine: Facts) -> list[str]:
    return sorted({*here, *machine.installed})


def _difference(name: str, here: tuple[str, str] | None, there: tuple[str, str] | None) -> str:
    if here == there:
        return ""
    if there is None:
        return f"{name} is missing"
    if here is None:
        return f"{name} {there[0]} is not installed on the machine that starts the run"
    if here[0] != there[0]:
        return f"{name} {there[0]} instead of {here[0]}"
    return f"{name} {there[0]} has other files"
