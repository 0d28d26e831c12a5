"""Surogate plugin: metrics.jsonl, one event a line."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `monitor=jsonl` is."""
    return "pkg://surogate_monitor_jsonl.conf"


@hookimpl
def surogate_monitor() -> bundles.MonitorSpec:
    """The monitor."""
    from surogate_monitor_jsonl.monitor import JsonlMonitor, JsonlOptions

    return bundles.MonitorSpec(name="jsonl", build=JsonlMonitor, options=JsonlOptions, keeps_record=True)
