"""Surogate plugin: tasks that train on pairs of a chosen and a rejected answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import bundles

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """The options ``task=dpo`` and so on."""
    return "pkg://surogate_task_preference.conf"


@hookimpl
def surogate_task() -> list[bundles.TaskSpec]:
    """The tasks `dpo`, `ipo`, `orpo` and `simpo`."""
    from surogate_task_preference.task import TASKS

    return list(TASKS)
