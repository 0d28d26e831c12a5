"""The teacher: another model, which reads the rows of the run once before the run's own model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from surogate_core.errors import ConfigError, Problem
from surogate_core.events import Progress
from surogate_core.generate.losses import logits_of
from surogate_core.inference import second_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_core.bundles import Plugins, RunKeys
    from surogate_core.inference.generation import PreparedModel
    from surogate_task_distill.store import Forward

KEY = "distill_teacher"


def open_teacher(word: str, config: RunKeys, registry: Plugins) -> PreparedModel:
    """The teacher, on the device and in the dtype of the run; no weight is read."""
    return second_model.open_model(KEY, word, config, registry)


def check_tokenizer(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, word: str) -> int:
    """The number of tokens. Raises `ConfigError` unless every token of the student has the same id in the teacher."""
    return second_model.check_tokenizer(KEY, student, teacher, word=word, fix="a teacher of the same model family")


def check_context(prepared: PreparedModel, longest: int, *, word: str) -> None:
    """Raise `ConfigError` if a document is longer than the teacher can read."""
    if longest > prepared.context:
        message = f"{word} reads up to {int(prepared.context):,} tokens, and a document has {longest:,}."
        raise ConfigError([Problem(key=KEY, message=message, fix=f"max_length={int(prepared.context)}")])


def forward_of(prepared: PreparedModel, registry: Plugins, show: Callable[[Progress], None]) -> Forward:
    """The teacher's forward, with its weights on the device."""
    weights = prepared.load(
        registry, progress=lambda task, done, total: show(Progress(task=f"teacher: {task}", done=done, total=total))
    )
    return partial(logits_of, weights)
