"""The tokenizer of a configuration; shared by training and `surogate tokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.config.choices import default_groups
from surogate_core.data.templates import apply_template
from surogate_core.data.text.tokenizer import check_vocabulary, load_tokenizer, vocabulary_size
from surogate_core.errors import UserError
from surogate_core.hf.tokenizer_files import TokenizerFiles
from surogate_core.train.checkpoint import CheckpointDir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_core.config.schema import RunConfig

SMALL_VOCABULARY = 0.8
"""If a tokenizer has a smaller share of a trained model's token ids, it may belong to another model."""


def tokenizer_of_run(
    config: RunConfig, *, vocab_size: int | None, pretrained: bool
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """The tokenizer, and notes about it for the user.

    `vocab_size` is the number of rows of the model's embedding, None if unknown; `pretrained` is whether its weights
    are pretrained. Raises `UserError` for a missing, broken or too large one.
    """
    where = config.tokenizer or config.model.path
    if where is None:
        raise UserError(
            f"tokenizer: a model from random weights has none of its own. "
            f"Fix: set `tokenizer` to a directory or hub id; dataset={default_groups()['dataset']} brings one too."
        )
    # The model's own tokenizer is read at the model's commit; another tokenizer may name its own revision.
    own = where == config.model.path
    notes: list[str] = []
    tokenizer = load_tokenizer(where, revision=config.model.revision if own else None, note=notes.append)
    apply_template(tokenizer, config.template)
    if vocab_size is None:
        return tokenizer, notes
    check_vocabulary(tokenizer, vocab_size)
    known = vocabulary_size(tokenizer)
    if pretrained and known < SMALL_VOCABULARY * vocab_size:
        notes.append(
            f"The tokenizer knows {known:,} of the model's {vocab_size:,} token ids: "
            f"make sure that it is the model's own."
        )
    return tokenizer, notes


def record_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The entry in the state of an adapter's checkpoints for a tokenizer that is not as the base has it."""
    files = TokenizerFiles.of(tokenizer) if config.lora and config.model.path is not None else None
    is_own = config.tokenizer in (None, config.model.path)
    if files is None or (is_own and not files.changes):
        return {}
    directory = None if is_own else str(files.directory.resolve())
    return {"tokenizer": {"directory": directory, "changes": dict(files.changes)}}


def record_in(used: Path) -> Mapping[str, Any]:
    """What a directory says of its tokenizer, if it is a checkpoint; see `record_of`."""
    found = CheckpointDir.load(used).state.get("tokenizer") if (used / "manifest.json").exists() else None
    return found or {}


def recorded(tokenizer: PreTrainedTokenizerBase, record: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer with the changes of a record."""
    for name, text in record.get("changes", {}).items():
        setattr(tokenizer, name, text)
    return tokenizer
