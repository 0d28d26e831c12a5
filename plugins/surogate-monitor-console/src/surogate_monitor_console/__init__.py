"""Surogate plugin: live console view."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `monitor=console` is."""
    return "pkg://surogate_monitor_console.conf"


@hookimpl
def surogate_monitor() -> bundles.MonitorSpec:
    """The monitor."""
    from surogate_monitor_console.options import ConsoleOptions, build

    return bundles.MonitorSpec(name="console", build=build, options=ConsoleOptions, prints=True)
