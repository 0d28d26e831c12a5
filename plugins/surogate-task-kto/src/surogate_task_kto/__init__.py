"""Surogate plugin: KTO, from single answers judged good or bad."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl
from surogate_task_kto.options import KTOOptions

if TYPE_CHECKING:
    from surogate_core.plugin import PreparedData

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `task=kto` is."""
    return "pkg://surogate_task_kto.conf"


@hookimpl
def surogate_dataset() -> bundles.DatasetFormat:
    """The format `unpaired`."""
    from surogate_task_kto.unpaired import FORMAT

    return FORMAT


@hookimpl
def surogate_task() -> bundles.TaskSpec:
    """KTO."""
    return bundles.TaskSpec(name="kto", build=_build, options=KTOOptions, objective=_objective)


def _build(config: bundles.RunKeys, data: PreparedData, options: KTOOptions) -> bundles.Task:
    from surogate_task_kto.task import KTOTask

    return KTOTask(config, data, options)


def _objective(options: KTOOptions) -> bundles.Objective:
    # torch is imported when the objective is made, not when a configuration is checked.
    from surogate_task_kto.loss import objective

    return objective(options)
