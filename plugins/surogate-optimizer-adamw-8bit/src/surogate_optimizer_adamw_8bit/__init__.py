"""Surogate plugin: AdamW with 8-bit blockwise state."""

from __future__ import annotations

from surogate_core import bundles, hookimpl

SUROGATE_API = ">=1,<2"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `optimizer=adamw_8bit` is."""
    return "pkg://surogate_optimizer_adamw_8bit.conf"


@hookimpl
def surogate_optimizer() -> bundles.OptimizerSpec:
    """AdamW in 8 bits."""
    from surogate_optimizer_adamw_8bit.adamw_8bit import STATE_BYTES, build

    return bundles.OptimizerSpec(name="adamw_8bit", build=build, state_bytes_per_parameter=STATE_BYTES)
