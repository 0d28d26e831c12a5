"""Surogate plugin: environments that OpenEnv servers run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl
from surogate_environment_openenv.options import OpenEnvOptions

if TYPE_CHECKING:
    from surogate_environment_openenv.sessions import ServerProblems

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_environment() -> bundles.EnvironmentSpec:
    """Environments behind an address."""
    return bundles.EnvironmentSpec(name="openenv", build=_build, options=OpenEnvOptions, weights={"steps": 0.0})


def _build(options: OpenEnvOptions) -> ServerProblems:
    from surogate_core.plugin import MachineError

    try:
        import websockets  # noqa: F401
    except ModuleNotFoundError as error:
        raise MachineError(
            f"environment openenv: the package {error.name} is not installed. "
            "Fix: pip install 'surogate-environment-openenv[client]'"
        ) from error
    from surogate_environment_openenv.sessions import ServerProblems

    return ServerProblems(options)
