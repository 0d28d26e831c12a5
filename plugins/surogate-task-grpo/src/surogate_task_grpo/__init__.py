"""Surogate plugin: reinforcement learning with groups of completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl
from surogate_task_grpo.checks import problems
from surogate_task_grpo.options import GRPOOptions, parts

if TYPE_CHECKING:
    from surogate_task_grpo.task import GRPOTask

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `task=grpo` is."""
    return "pkg://surogate_task_grpo.conf"


@hookimpl
def surogate_task() -> bundles.TaskSpec:
    """The task `grpo`."""
    return bundles.TaskSpec(
        name="grpo",
        options=GRPOOptions,
        parts=parts,
        objective=_objective,
        online=_task,
        planned=_planned,
        check=problems,
    )


@hookimpl
def surogate_advantage() -> list[bundles.AdvantageSpec]:
    """Rewards compared within a prompt's completions."""
    from surogate_task_grpo.advantages import ADVANTAGES

    return [*ADVANTAGES]


@hookimpl
def surogate_policy_loss() -> list[bundles.PolicyLossSpec]:
    """The published losses, and prime-rl's."""
    from surogate_task_grpo.policy_losses import POLICY_LOSSES

    return [*POLICY_LOSSES]


def _objective(options: GRPOOptions, parts: Mapping[str, bundles.Part]) -> bundles.Objective:
    from surogate_reinforcement.policy import Policy

    return Policy(parts["policy_loss"], options).objective()


def _task(context: bundles.OnlineContext) -> GRPOTask:
    # torch is imported when the task is built, not when a configuration is checked.
    from surogate_task_grpo.task import GRPOTask

    return GRPOTask(context)


def _planned(config: bundles.RunKeys, options: GRPOOptions, weights: bundles.ModelWeights) -> tuple[int, str]:
    from surogate_task_grpo.task import planned

    return planned(config, options, weights)
