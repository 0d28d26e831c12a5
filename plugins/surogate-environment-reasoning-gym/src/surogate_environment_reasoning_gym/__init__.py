"""Surogate plugin: the data sets of reasoning-gym as environments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl
from surogate_environment_reasoning_gym.options import ReasoningGymOptions

if TYPE_CHECKING:
    from surogate_environment_reasoning_gym.problems import ReasoningGym

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_environment() -> bundles.EnvironmentSpec:
    """The data sets of reasoning-gym."""
    return bundles.EnvironmentSpec(
        name="reasoning-gym",
        build=_build,
        options=ReasoningGymOptions,
        weights={"answered": 0.0, "failed": 0.0},
    )


def _build(options: ReasoningGymOptions) -> ReasoningGym:
    from surogate_core.plugin import MachineError

    try:
        import reasoning_gym  # noqa: F401
    except ModuleNotFoundError as error:
        raise MachineError(
            f"environment reasoning-gym: the package {error.name} is not installed. "
            "Fix: pip install 'surogate-environment-reasoning-gym[gym]'"
        ) from error
    from surogate_environment_reasoning_gym.problems import ReasoningGym

    return ReasoningGym(options)
