"""The reports of runs that are over, written by the plugins that offer them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surogate_core.errors import PluginError
from surogate_core.plugins import load_plugins
from surogate_core.plugins.catalogue import catalogue, install_command


def write_reports(directories: Sequence[Path]) -> list[Path]:
    """Write every report of the runs anew; the files, of which the first is the one to open.

    Raises `PluginError` if no installed plugin writes reports.
    """
    specs = load_plugins().all("report")
    if not specs:
        known = catalogue()
        needed = sorted({str(known.distribution_of("report", name)) for name in known.names("report")})
        raise PluginError(f"no installed plugin writes reports. Fix: {install_command(*needed)}")
    return [file for spec in specs.values() for file in spec.write(directories)]
