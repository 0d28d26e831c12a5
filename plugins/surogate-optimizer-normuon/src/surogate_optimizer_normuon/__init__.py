"""Surogate plugin: NorMuon, orthogonalised updates with a second moment for each neuron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Interval

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_optimizer_normuon.normuon import NorMuon

SUROGATE_API = ">=2,<3"


@dataclass(frozen=True, slots=True, kw_only=True)
class NorMuonOptions:
    """Options of NorMuon."""

    momentum: Annotated[float, Interval(ge=0, lt=1), bundles.Flat("normuon_momentum")] = 0.95
    """Decay of NorMuon's momentum."""
    beta2: Annotated[float, Interval(ge=0, lt=1), bundles.Flat("normuon_beta2")] = 0.95
    """Decay of NorMuon's second moment of each row."""
    cautious_wd: Annotated[bool, bundles.Flat("normuon_cautious_wd")] = True
    """NorMuon decays only weights that its update moves towards zero."""
    adamw_beta1: Annotated[float, Interval(ge=0, lt=1), bundles.Flat("adamw_beta1")] = 0.9
    """Decay of the first moment of embeddings, head, norms and biases."""
    adamw_beta2: Annotated[float, Interval(ge=0, lt=1), bundles.Flat("adamw_beta2")] = 0.999
    """Decay of their second moment."""
    adamw_epsilon: Annotated[float, Interval(gt=0, le=1), bundles.Flat("adamw_epsilon")] = 1e-8
    """Added to their update's denominator."""
    rest_lr_factor: Annotated[float, Gt(0)] = 1.0
    """The learning rate of embeddings, head, norms and biases, as a multiple of `learning_rate`."""


@hookimpl
def surogate_config_path() -> str:
    """Where the option `optimizer=normuon` is."""
    return "pkg://surogate_optimizer_normuon.conf"


@hookimpl
def surogate_optimizer() -> bundles.OptimizerSpec:
    """NorMuon."""
    return bundles.OptimizerSpec(
        name="normuon",
        build=_build,
        options=NorMuonOptions,
        state_bytes_per_parameter=4.0,
        master_dtypes=("fp32", "bf16"),
        rate_scale=30.0,
        adapters=False,  # they are not orthogonalised: what it would do with them is AdamW
    )


def _build(groups: Sequence[bundles.ParamGroup], options: NorMuonOptions) -> NorMuon:
    # torch is imported when the optimizer is built, not when a configuration is checked.
    from surogate_optimizer_normuon.normuon import NorMuon

    return NorMuon(groups, options)
