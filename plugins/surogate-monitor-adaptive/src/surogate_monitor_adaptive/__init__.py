"""Surogate plugin: phases, advice, loss guard and early stop."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `monitor=adaptive` is."""
    return "pkg://surogate_monitor_adaptive.conf"


@hookimpl
def surogate_monitor() -> bundles.MonitorSpec:
    """The monitor."""
    from surogate_monitor_adaptive.monitor import AdaptiveMonitor, AdaptiveOptions

    return bundles.MonitorSpec(name="adaptive", build=AdaptiveMonitor, options=AdaptiveOptions)
