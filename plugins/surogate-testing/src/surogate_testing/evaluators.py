"""Checks of evaluators: their name, and tasks that they do not have."""

from __future__ import annotations

from surogate_core.plugin import SurogateError, bundles
from surogate_testing.check import ensure

UNKNOWN = "no-such-task"


def can_be_named_before_a_colon(spec: bundles.EvaluatorSpec) -> None:
    """``--tasks NAME:BENCHMARK`` ends the name at the first colon."""
    ensure(bool(spec.name) and ":" not in spec.name, f"the name is {spec.name!r}")


def takes_or_refuses_a_task_by_name(spec: bundles.EvaluatorSpec) -> None:
    """A task that it does not have is one of the core's errors, with the task's name, before a model is there."""
    try:
        opened = spec.open([UNKNOWN], bundles.EvalSettings())
    except SurogateError as error:
        ensure(UNKNOWN in str(error), f"the error does not name the task: {error}")
    else:
        ensure(callable(getattr(opened, "run", None)), f"{type(opened).__name__} has no method `run`")


CHECKS = (can_be_named_before_a_colon, takes_or_refuses_a_task_by_name)
