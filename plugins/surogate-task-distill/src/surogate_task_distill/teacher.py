"""The teacher: another model, which reads the rows of the run once before the run's own model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from surogate_core.plugin import ConfigError, Problem, events, inference, second_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_core.plugin import bundles
    from surogate_task_distill.store import Forward

KEY = "distill_teacher"


def open_teacher(word: str, config: bundles.RunKeys, registry: bundles.Plugins) -> inference.PreparedModel:
    """The teacher, on the device and in the dtype of the run; no weight is read."""
    return second_model.open_model(KEY, word, config, registry)


def check_tokenizer(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, word: str) -> int:
    """The number of tokens. Raises `ConfigError` unless every token of the student has the same id in the teacher."""
    return second_model.check_tokenizer(KEY, student, teacher, word=word, fix="a teacher of the same model family")


def check_context(prepared: inference.PreparedModel, longest: int, *, word: str) -> None:
    """Raise `ConfigError` if a document is longer than the teacher can read."""
    if longest > prepared.context:
        message = f"{word} reads up to {int(prepared.context):,} tokens, and a document has {longest:,}."
        raise ConfigError([Problem(key=KEY, message=message, fix=f"max_length={int(prepared.context)}")])


def forward_of(
    prepared: inference.PreparedModel, registry: bundles.Plugins, show: Callable[[events.Progress], None]
) -> Forward:
    """The teacher's forward, with its weights on the device."""
    weights = prepared.load(
        registry,
        progress=lambda task, done, total: show(events.Progress(task=f"teacher: {task}", done=done, total=total)),
    )
    return partial(inference.logits_of, weights)
