"""Surogate plugin: a run on several machines of a Ray cluster."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `launcher=ray` is."""
    return "pkg://surogate_launcher_ray.conf"


@hookimpl
def surogate_launcher() -> bundles.Launcher:
    """The launcher."""
    from surogate_launcher_ray.launcher import launch
    from surogate_launcher_ray.options import RayOptions

    return bundles.Launcher(name="ray", launch=launch, options=RayOptions)
