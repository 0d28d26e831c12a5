"""Surogate plugin: NorMuon, orthogonalised updates with a second moment for each neuron."""

from __future__ import annotations

from surogate_core import bundles, hookimpl

SUROGATE_API = ">=1,<2"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `optimizer=normuon` is."""
    return "pkg://surogate_optimizer_normuon.conf"


@hookimpl
def surogate_optimizer() -> bundles.OptimizerSpec:
    """NorMuon."""
    from surogate_optimizer_normuon.normuon import NorMuon, NorMuonOptions

    return bundles.OptimizerSpec(name="normuon", build=NorMuon, options=NorMuonOptions, state_bytes_per_parameter=4.0)
