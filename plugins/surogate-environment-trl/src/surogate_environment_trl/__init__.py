"""Surogate plugin: TRL reward functions as an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl
from surogate_environment_trl.options import RewardFunctionOptions

if TYPE_CHECKING:
    from surogate_environment_trl.problems import Rewarded

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_environment() -> bundles.EnvironmentSpec:
    """Prompts of a file, judged by functions that TRL's GRPOTrainer takes as `reward_funcs`."""
    return bundles.EnvironmentSpec(name="trl", build=_build, options=RewardFunctionOptions)


def _build(options: RewardFunctionOptions) -> Rewarded:
    from surogate_environment_trl.problems import build

    return build(options)
