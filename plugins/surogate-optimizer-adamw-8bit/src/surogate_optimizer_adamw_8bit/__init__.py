"""Surogate plugin: AdamW with 8-bit blockwise state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import adamw_8bit

SUROGATE_API = ">=2,<3"

STATE_BYTES = 2 * (1 + 4 / bundles.FLAT_ALIGNMENT)
"""Two codes, and two fp32 absmax for each block."""
CPU_COST = 16.0
"""8.0 against 0.5 ns a parameter on one core (EPYC)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW8bitOptions:
    """Options of `optimizer=adamw_8bit`."""

    beta1: Annotated[float, Interval(ge=0, lt=1), bundles.Flat("adamw_beta1")] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Interval(ge=0, lt=1), bundles.Flat("adamw_beta2")] = 0.999
    """Decay of AdamW's second moment."""
    epsilon: Annotated[float, Interval(gt=0, le=1), bundles.Flat("adamw_epsilon")] = 1e-8
    """Added to AdamW's denominator."""


@hookimpl
def surogate_config_path() -> str:
    """Where the option `optimizer=adamw_8bit` is."""
    return "pkg://surogate_optimizer_adamw_8bit.conf"


@hookimpl
def surogate_optimizer() -> bundles.OptimizerSpec:
    """AdamW in 8 bits."""
    return bundles.OptimizerSpec(
        name="adamw_8bit",
        build=_build,
        options=AdamW8bitOptions,
        state_bytes_per_parameter=STATE_BYTES,
        rule="adamw",
        whole_matrices=False,
        cpu_cost=CPU_COST,
        master_dtypes=("fp32", "bf16"),
    )


def _build(groups: Sequence[bundles.ParamGroup], options: AdamW8bitOptions) -> adamw_8bit.BlockwiseAdamW:
    # torch is imported when the optimizer is built, not when a configuration is checked.
    from surogate_optimizer_adamw_8bit.adamw_8bit import build

    return build(groups, options)
