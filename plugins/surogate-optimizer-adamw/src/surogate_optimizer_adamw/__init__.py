"""Surogate plugin: AdamW with fp32 state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_optimizer_adamw.adamw import AdamW

SUROGATE_API = ">=2,<3"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWOptions:
    """Options of `optimizer=adamw`."""

    beta1: Annotated[float, Interval(ge=0, lt=1), bundles.Flat("adamw_beta1")] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Interval(ge=0, lt=1), bundles.Flat("adamw_beta2")] = 0.999
    """Decay of AdamW's second moment."""
    epsilon: Annotated[float, Interval(gt=0, le=1), bundles.Flat("adamw_epsilon")] = 1e-8
    """Added to AdamW's denominator."""


@hookimpl
def surogate_config_path() -> str:
    """Where the option `optimizer=adamw` is."""
    return "pkg://surogate_optimizer_adamw.conf"


@hookimpl
def surogate_optimizer() -> bundles.OptimizerSpec:
    """AdamW."""
    return bundles.OptimizerSpec(
        name="adamw",
        build=_build,
        options=AdamWOptions,
        state_bytes_per_parameter=8.0,
        rule="adamw",
        whole_matrices=False,
        master_dtypes=("fp32", "bf16"),
    )


def _build(groups: Sequence[bundles.ParamGroup], options: AdamWOptions) -> AdamW:
    # torch is imported when the optimizer is built, not when a configuration is checked.
    from surogate_optimizer_adamw.adamw import AdamW

    return AdamW(groups, options)
