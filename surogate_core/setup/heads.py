"""The head of a run's model: that which its task trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surogate_core.errors import ConfigError, Problem
from surogate_core.setup.task_spec import task_spec

if TYPE_CHECKING:
    from surogate_core.bundles import ModelFamily, TaskSpec
    from surogate_core.config.schema import RunConfig
    from surogate_core.dsl import Model
    from surogate_core.hf.weights import ModelDir
    from surogate_core.plugins.registry import Registry


def built_for(family: ModelFamily, values: dict[str, Any], task: TaskSpec | None) -> tuple[dict[str, Any], Model]:
    """The model and its ``config.json``, with the head that the task trains."""
    model = family.build(values)
    if task is None or model.head.kind == task.head or model.other_head is not None:
        return values, model
    other = model.with_head(task.head)
    if other is None:
        kinds = ", ".join(dict.fromkeys((model.head.kind, *(cls.kind for cls in model.heads))))
        message = f"trains a head of kind {task.head}, and models of family {family.name} have {kinds}."
        raise ConfigError([Problem(key="task", message=f"{task.name} {message}", fix="name another model.")])
    return other, family.build(other)


def check_head(config: RunConfig, registry: Registry, model: Model, title: str) -> None:
    """Raise `ConfigError` if the model has a head of another kind than the task trains."""
    head, wanted = model.head, task_spec(config, registry).head
    if head.kind != wanted:
        able = [f"task={name}" for name, spec in registry.all("task").items() if spec.head == head.kind]
        what = f"{title} is {head.model_name}, whose head gives {head.kind}"
        message = f"{what}; task {config.task} needs {wanted}."
        fix = f"{' or '.join(able)}, or name another model." if able else "name another model."
        raise ConfigError([Problem(key="task", message=message, fix=fix)])


def new_names(model: Model, files: ModelDir) -> frozenset[str]:
    """The tensors of the head that begin from random numbers, because the files are of a model with another head."""
    return frozenset() if model.head.is_of(files.config) else model.head.own(model)
