"""Surogate plugin: environments of verifiers, of its 0.1 line and of its 0.4 line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core import bundles, hookimpl
from surogate_environment_verifiers.options import VerifiersOptions

if TYPE_CHECKING:
    from surogate_core.bundles import Environment

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_environment() -> bundles.EnvironmentSpec:
    """Environments of verifiers."""
    return bundles.EnvironmentSpec(name="verifiers", build=_build, options=VerifiersOptions)


def _build(options: VerifiersOptions) -> Environment:
    from surogate_environment_verifiers.loading import load

    return load(options)
