"""Surogate plugin: the run's figures in Trackio."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `monitor=trackio` is."""
    return "pkg://surogate_monitor_trackio.conf"


@hookimpl
def surogate_monitor() -> bundles.MonitorSpec:
    """The monitor."""
    from surogate_monitor_trackio.monitor import TrackioMonitor, TrackioOptions

    return bundles.MonitorSpec(name="trackio", build=TrackioMonitor, options=TrackioOptions)
