"""The tokenizer of a configuration; shared by training and `surogate tokenize`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.config.choices import default_groups
from surogate_core.data.templates import apply_template
from surogate_core.data.tokenizer import check_vocabulary, load_tokenizer
from surogate_core.errors import UserError

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
    known = len(tokenizer.get_vocab())
    if pretrained and known < SMALL_VOCABULARY * vocab_size:
        notes.append(
            f"The tokenizer knows {known:,} of the model's {vocab_size:,} token ids: "
            f"make sure that it is the model's own."
        )
    return tokenizer, notes
