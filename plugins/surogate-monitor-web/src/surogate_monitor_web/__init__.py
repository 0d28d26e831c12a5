"""Surogate plugin: a live page of the run, on this machine only."""

from __future__ import annotations

from surogate_core import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `monitor=web` is."""
    return "pkg://surogate_monitor_web.conf"


@hookimpl
def surogate_monitor() -> bundles.MonitorSpec:
    """The monitor."""
    from surogate_monitor_web.monitor import WebMonitor, WebOptions

    return bundles.MonitorSpec(name="web", build=WebMonitor, options=WebOptions)
