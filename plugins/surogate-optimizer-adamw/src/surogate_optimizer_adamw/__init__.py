"""Surogate plugin: AdamW with fp32 state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surogate_core import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_optimizer_adamw.adamw import AdamW

SUROGATE_API = ">=1,<2"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `optimizer=adamw` is."""
    return "pkg://surogate_optimizer_adamw.conf"


@hookimpl
def surogate_optimizer() -> bundles.OptimizerSpec:
    """AdamW."""
    return bundles.OptimizerSpec(
        name="adamw", build=_build, state_bytes_per_parameter=8.0, master_dtypes=("fp32", "bf16")
    )


def _build(groups: Sequence[bundles.ParamGroup], settings: bundles.OptimizerSettings, options: Any) -> AdamW:
    # torch is imported when the optimizer is built, not when a configuration is checked.
    from surogate_optimizer_adamw.adamw import AdamW

    return AdamW.build(groups, settings, options)
