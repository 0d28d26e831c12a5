"""Surogate plugin: AdamW with 8-bit blockwise state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surogate_core import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.formats.adamw_8bit import BlockwiseAdamW

SUROGATE_API = ">=1,<2"

STATE_BYTES = 2 * (1 + 4 / bundles.FLAT_ALIGNMENT)
"""Two codes, and two fp32 absmax for each block."""


@hookimpl
def surogate_config_path() -> str:
    """Where the option `optimizer=adamw_8bit` is."""
    return "pkg://surogate_optimizer_adamw_8bit.conf"


@hookimpl
def surogate_optimizer() -> bundles.OptimizerSpec:
    """AdamW in 8 bits."""
    return bundles.OptimizerSpec(
        name="adamw_8bit", build=_build, state_bytes_per_parameter=STATE_BYTES, master_dtypes=("fp32", "bf16")
    )


def _build(groups: Sequence[bundles.ParamGroup], settings: bundles.OptimizerSettings, options: Any) -> BlockwiseAdamW:
    # torch is imported when the optimizer is built, not when a configuration is checked.
    from surogate_optimizer_adamw_8bit.adamw_8bit import build

    return build(groups, settings, options)
