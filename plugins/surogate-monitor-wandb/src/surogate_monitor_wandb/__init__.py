"""Surogate plugin: the run's figures in Weights & Biases."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `monitor=wandb` is."""
    return "pkg://surogate_monitor_wandb.conf"


@hookimpl
def surogate_monitor() -> bundles.MonitorSpec:
    """The monitor."""
    from surogate_monitor_wandb.monitor import WandbMonitor, WandbOptions

    return bundles.MonitorSpec(name="wandb", build=WandbMonitor, options=WandbOptions)
