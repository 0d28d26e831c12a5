"""A model that a run reads with beside the one that it trains: a teacher, or a reward model. It stays as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from surogate_core.bundles.handed import whole
from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import RunConfig
from surogate_core.data.cache import digest_of
from surogate_core.dsl.heads import ScoreHead
from surogate_core.errors import ConfigError, Problem, UserError
from surogate_core.hf.contents import Contents, digest_cache
from surogate_core.hf.lora_files import stack_fingerprint
from surogate_core.hf.weights import config_in, locate
from surogate_core.inference.generation import Named, PreparedModel, named, on_its_base, placed, prepare
from surogate_core.plugins.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_core.bundles.handed import Plugins, RunKeys


def open_model(key: str, word: str, config: RunKeys, registry: Plugins) -> PreparedModel:
    """The language model that `key` names, on the device and in the dtype of the run; no weight is read.

    Raises `ConfigError` if there is none, and `UserError` for one that cannot be used.
    """
    found = named_model(key, word)
    try:
        return prepare(found, _config_of(found, config, registry), whole(Registry, registry))
    except ConfigError as error:
        raise _absent(key, word) from error
    except UserError as error:
        raise UserError(f"{key}={word}: {error}") from error


def open_reward_model(key: str, word: str, config: RunKeys, registry: Plugins) -> PreparedModel:
    """The same of a reward model with one score: a directory, a run, or an adapter with the head on its base.

    Raises `ConfigError` also for a language model, and for a model with several labels.
    """
    task = next((name for name, spec in registry.all("task").items() if spec.head == ScoreHead.kind), None)
    if task is None:
        message = "no installed plugin has a task that trains reward models, which says how one is read."
        raise _refused(key, message, fix="install one; `surogate plugins list` shows what is there")
    found = named_model(key, word)
    try:
        own = _config_of(found, config, registry, f"task={task}")
    except ConfigError as error:
        raise _absent(key, word) from error
    _check_head(key, word, found)
    try:
        return prepare(found, own, whole(Registry, registry), generates=False)
    except UserError as error:
        raise UserError(f"{key}={word}: {error}") from error


def named_model(key: str, word: str) -> Named:
    """What a user's word for a model means; raises `ConfigError` if there is none."""
    try:
        return named(word, fix=on_its_base("surogate merge"))
    except UserError as error:
        raise _absent(key, word, str(error)) from error


def _config_of(found: Named, given: RunKeys, registry: Plugins, *more: str) -> RunConfig:
    config = whole(RunConfig, given)
    own = load_run_config([*found.overrides, *placed(config), *more], registry=whole(Registry, registry))
    return replace(own, data_cache_dir=config.data_cache_dir, deterministic=config.deterministic)


def _check_head(key: str, word: str, found: Named) -> None:
    """Raise `ConfigError` unless the head that is read gives one score."""
    path, revision = found.base
    values = config_in(locate(path, revision=revision, weights=False, key=key))
    fix = "a directory or a run of `surogate reward`"
    if not ScoreHead.is_of(values):
        if found.stack and found.stack[-1].replaces(ScoreHead.weight_name):
            return
        message = f"{word} is a language model, whose head gives next tokens; a reward model gives one score."
        raise _refused(key, message, fix=fix)
    # As in transformers, a config.json without labels has two.
    labels = len(values.get("id2label") or ()) or int(values.get("num_labels", 2))
    if labels != 1:
        raise _refused(key, f"{word} has {labels} labels, and a reward model gives one score.", fix=fix)


def check_tokenizer(
    key: str, own: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, *, word: str, fix: str
) -> int:
    """The number of tokens. Raises `ConfigError` unless every token of the run has the same id in the second model."""
    vocabulary, others = own.get_vocab(), theirs.get_vocab()
    for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
        if others.get(token) != number:
            there = f"has id {others[token]}" if token in others else "does not exist"
            message = (
                f"{word} has another tokenizer than the model: token {token!r} has id {number} here and {there} there."
            )
            raise _refused(key, message, fix=fix)
    return max(vocabulary.values()) + 1


def digest(prepared: PreparedModel) -> str:
    """Digest of what the model computes with: weights, adapters and dtype."""
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


def _absent(key: str, word: str, reason: str = "") -> ConfigError:
    shown = reason.partition(" Fix:")[0].removeprefix(f"{word}: ") or "there is no such model."
    return _refused(key, f"{word}: {shown}", fix=f"{key}=DIRECTORY, a run, or OWNER/NAME on the hub")


def _refused(key: str, message: str, *, fix: str) -> ConfigError:
    return ConfigError([Problem(key=key, message=message, fix=fix)])
