"""Surogate plugin: event files for TensorBoard."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `monitor=tensorboard` is."""
    return "pkg://surogate_monitor_tensorboard.conf"


@hookimpl
def surogate_monitor() -> bundles.MonitorSpec:
    """The monitor."""
    from surogate_monitor_tensorboard.monitor import TensorboardMonitor, TensorboardOptions

    return bundles.MonitorSpec(name="tensorboard", build=TensorboardMonitor, options=TensorboardOptions)
