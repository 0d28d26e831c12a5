"""The head of a run's model: the one that its task trains, and whether it is the embedding, which the files decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.dsl.declare import Model
from surogate_core.errors import ConfigError, Problem
from surogate_core.hf.weights import TIED, ModelDir, is_complete
from surogate_core.setup.task_spec import task_spec

if TYPE_CHECKING:
    from surogate_core.bundles import ModelFamily, TaskSpec
    from surogate_core.config.schema import RunConfig
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


HEAD = "lm_head.weight"
"""The usual name of a head."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "embeddings.weight")
"""Ends of the usual names of embeddings."""


def read_head(
    family: ModelFamily, model: Model, files: ModelDir | None, place: Path | None
) -> tuple[Model, ModelDir | None]:
    """A model and its files as they are used: a copy of the embedding is no head, and a head of its own unties both.

    `files`: None if only the configuration is read; the files at `place` decide even then, if they are all there.
    """
    if not model.tied or place is None:
        return model, files
    known = files
    if known is None and is_complete(place):
        known = ModelDir.open(place)
    if known is None:
        return model, None
    assert model.head.tied is not None
    key = model.head.tied.key
    known = known.with_head(model.head.hf_name, model.embed.hf_name, key=key)
    if known.config.get(key) is False:
        model = family.build({**model.config, key: False})
    return model, None if files is None else known


def read_head_of(
    files: ModelDir, families: Callable[[], Mapping[str, ModelFamily]], title: str
) -> tuple[ModelDir, str | None]:
    """The files and a note, of a model whose family may not be installed: the usual names count first.

    `families`: called only if ``config.json`` ties the head, and the files have one, but no usual embedding.
    """
    if not files.config.get(TIED) or HEAD not in files.names():
        return files, None
    found = [name for name in files.names() if name.endswith(_EMBEDDINGS)]
    if not found:
        kind = files.config.get("model_type")
        family = next((family for family in families().values() if kind in family.hf_model_types), None)
        found = [] if family is None else [family.build(files.config).embed.hf_name]
    if len(found) == 1:
        files = files.with_head(HEAD, found[0])
    return files, None if files.config.get(TIED) else own_head_note(title, TIED)


def own_head_note(title: str, key: str) -> str:
    """A note about a model whose `key` ties the head, and whose files have a head of their own."""
    return (
        f"The config.json of {title} says {key} true, and its weight files have a head with other values than the "
        f"embedding. The model is read and exported with this head, untied, as transformers 5 reads it."
    )
