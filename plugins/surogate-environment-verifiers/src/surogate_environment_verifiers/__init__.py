"""Surogate plugin: environments of verifiers, of its 0.1 line and of its 0.4 line."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl
from surogate_environment_verifiers.options import VerifiersOptions

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_environment() -> bundles.EnvironmentSpec:
    """Environments of verifiers."""
    return bundles.EnvironmentSpec(name="verifiers", build=_build, options=VerifiersOptions)


def _build(options: VerifiersOptions) -> bundles.Environment:
    from surogate_environment_verifiers.loading import load

    return load(options)
