"""Surogate plugin: NorMuon, orthogonalised updates with a second moment for each neuron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from surogate_core import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_optimizer_normuon.normuon import NorMuon

SUROGATE_API = ">=1,<2"


@dataclass(frozen=True, slots=True, kw_only=True)
class NorMuonOptions:
    """Options of NorMuon."""

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
        adapters=False,  # they are not orthogonalised: what it would do with them is AdamW
    )


def _build(
    groups: Sequence[bundles.ParamGroup], settings: bundles.OptimizerSettings, options: NorMuonOptions
) -> NorMuon:
    # torch is imported when the optimizer is built, not when a configuration is checked.
    from surogate_optimizer_normuon.normuon import NorMuon

    return NorMuon(groups, settings, options)
