"""Surogate plugin: reward models from pairs of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl
from surogate_task_reward.options import RewardOptions

if TYPE_CHECKING:
    from surogate_core.plugin import PreparedData

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `task=reward` is."""
    return "pkg://surogate_task_reward.conf"


@hookimpl
def surogate_task() -> bundles.TaskSpec:
    """Training of a reward model."""
    return bundles.TaskSpec(
        name="reward", build=_build, options=RewardOptions, objective=_objective, head="scores", group=2
    )


def _build(config: bundles.RunKeys, data: PreparedData, options: RewardOptions) -> bundles.Task:
    from surogate_task_reward.task import RewardTask

    return RewardTask(config, data)


def _objective(options: RewardOptions) -> bundles.Objective:
    # torch is imported when the objective is made, not when a configuration is checked.
    from surogate_task_reward.loss import objective

    return objective(options)
