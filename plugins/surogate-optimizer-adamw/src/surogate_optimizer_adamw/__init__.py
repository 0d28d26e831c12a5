"""Surogate plugin: AdamW with fp32 state."""

from __future__ import annotations

from surogate_core import bundles, hookimpl

SUROGATE_API = ">=1,<2"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `optimizer=adamw` is."""
    return "pkg://surogate_optimizer_adamw.conf"


@hookimpl
def surogate_optimizer() -> bundles.OptimizerSpec:
    """AdamW."""
    from surogate_optimizer_adamw.adamw import AdamW

    return bundles.OptimizerSpec(name="adamw", build=AdamW.build, state_bytes_per_parameter=8.0)
