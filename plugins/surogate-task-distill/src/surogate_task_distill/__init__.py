"""Surogate plugin: distillation from the most probable tokens of a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl
from surogate_task_distill.options import DistillOptions

if TYPE_CHECKING:
    from surogate_core.plugin import PreparedData

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `task=distill` is."""
    return "pkg://surogate_task_distill.conf"


@hookimpl
def surogate_task() -> bundles.TaskSpec:
    """Distillation."""
    return bundles.TaskSpec(
        name="distill",
        build=_build,
        options=DistillOptions,
        objective=_objective,
        needs={"distill_teacher": "DIR_OR_HUB_ID"},
    )


def _build(config: bundles.RunKeys, data: PreparedData, options: DistillOptions) -> bundles.Task:
    from surogate_task_distill.task import DistillTask

    return DistillTask(config, data, options)


def _objective(options: DistillOptions) -> bundles.Objective:
    # torch is imported when the objective is made, not when a configuration is checked.
    from surogate_task_distill.loss import objective

    return objective(options)
