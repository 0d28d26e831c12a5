"""Surogate plugin: the run's figures in MLflow."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `monitor=mlflow` is."""
    return "pkg://surogate_monitor_mlflow.conf"


@hookimpl
def surogate_monitor() -> bundles.MonitorSpec:
    """The monitor."""
    from surogate_monitor_mlflow.monitor import MlflowMonitor, MlflowOptions

    return bundles.MonitorSpec(name="mlflow", build=MlflowMonitor, options=MlflowOptions)
