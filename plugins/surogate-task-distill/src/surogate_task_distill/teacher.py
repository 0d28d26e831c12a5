"""The teacher: another model, which reads the rows of the run once before the run's own model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from surogate_core.config.resolve import load_run_config
from surogate_core.data.cache import digest_of
from surogate_core.errors import ConfigError, Problem, UserError
from surogate_core.events import Progress
from surogate_core.generate.losses import logits_of
from surogate_core.hf.contents import Contents, digest_cache
from surogate_core.hf.lora_files import stack_fingerprint
from surogate_core.run.evaluation import placed
from surogate_core.run.generation import Prepared, named, on_its_base, prepare

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_core.config.schema import RunConfig
    from surogate_core.plugins.registry import Registry
    from surogate_task_distill.store import Forward

KEY = "distill_teacher"


def open_teacher(word: str, config: RunConfig, registry: Registry) -> Prepared:
    """The teacher, on the device and in the dtype of the run; no weight is read."""
    try:
        found = named(word, fix=on_its_base("surogate merge"))
        own = load_run_config([*found.overrides, *placed(config)], registry=registry)
        return prepare(found, replace(own, data_cache_dir=config.data_cache_dir), registry)
    except ConfigError as error:
        fix = f"{KEY}=DIRECTORY, a run, or OWNER/NAME on the hub"
        raise ConfigError([Problem(key=KEY, message=f"{word}: there is no such model.", fix=fix)]) from error
    except UserError as error:
        raise UserError(f"{KEY}={word}: {error}") from error


def check_tokenizer(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, word: str) -> int:
    """The number of tokens. Raises `ConfigError` unless every token of the student has the same id in the teacher."""
    own, theirs = student.get_vocab(), teacher.get_vocab()
    for token, number in sorted(own.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            there = f"has id {theirs[token]}" if token in theirs else "does not exist"
            message = (
                f"{word} has another tokenizer than the model: token {token!r} has id {number} here and {there} there."
            )
            raise ConfigError([Problem(key=KEY, message=message, fix="a teacher of the same model family")])
    return max(own.values()) + 1


def check_context(prepared: Prepared, longest: int, *, word: str) -> None:
    """Raise `ConfigError` if a document is longer than the teacher can read."""
    if longest > prepared.context:
        message = f"{word} reads up to {int(prepared.context):,} tokens, and a document has {longest:,}."
        raise ConfigError([Problem(key=KEY, message=message, fix=f"max_length={int(prepared.context)}")])


def digest(prepared: Prepared) -> str:
    """Digest of what the teacher computes with: weights, adapters and dtype."""
    files: dict[str, str] = {}
    resolved = prepared.resolved
    if resolved.weights is not None:
        contents = Contents(resolved.weights.files, digest_cache(prepared.config.data_cache_dir))
        try:
            files = contents.digests()
        finally:
            contents.close()
    return digest_of(
        {
            "files": files,
            "model": resolved.fingerprint,
            "config": dict(prepared.model.config),
            "adapters": stack_fingerprint(resolved.adapter.stack) if resolved.adapter is not None else None,
            "dtype": prepared.config.model_dtype,
        }
    )


def forward_of(prepared: Prepared, registry: Registry, show: Callable[[Progress], None]) -> Forward:
    """The teacher's forward, with its weights on the device."""
    weights = prepared.load(
        registry, progress=lambda task, done, total: show(Progress(task=f"teacher: {task}", done=done, total=total))
    )
    return partial(logits_of, weights)
