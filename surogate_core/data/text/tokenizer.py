"""Tokenizers: loading, the digest of what they do, and their fit to a model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.data.text import tokenizer_file
from surogate_core.errors import UserError, printable
from surogate_core.files.hub import absent, fetch, one_revision
from surogate_core.files.paths import is_hub_id, resolve_package_path
from surogate_core.files.tokenizers import check_files, named_panics
from surogate_core.imports import distributions_when_asked, imported_when_called, quick_import

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""The files of a tokenizer and its chat templates, as glob patterns; the first three show that there is a tokenizer."""


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has a tokenizer."""
    return any((directory / name).exists() for name in TOKENIZER_FILES[:3])


def load_tokenizer(
    path: str, *, revision: str | None = None, note: Callable[[str], None] = lambda text: None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory, a ``pkg://`` directory or a hub id; code in it is never run.

    It follows its tokenizer.json, also where transformers has other rules for it, and none depends on chance.
    `revision` is the branch, tag or commit of a hub id; ``owner/name@revision`` names it too. `note` receives what its
    user should know.
    Raises `UserError` when it is missing, incomplete or broken, `MachineError` when the hub cannot be reached.
    """
    local = Path(resolve_package_path(path)).expanduser()
    if local.is_dir():
        if not has_tokenizer(local):
            raise UserError(
                f"tokenizer {path}: the directory has no tokenizer.json, tokenizer.model or tokenizer_config.json. "
                f"Fix: set `tokenizer` to the directory or hub id of the model's tokenizer."
            )
    elif local.exists():
        raise UserError(f"tokenizer {path}: this is a file. Fix: name its directory.")
    else:
        repo, revision = one_revision(path, revision, key="tokenizer")
        if not is_hub_id(repo):
            raise UserError(f"tokenizer {path}: no such directory. Fix: correct `tokenizer`.")
        local = fetch(repo, ("config.json", *TOKENIZER_FILES), revision=revision, key="tokenizer")
        if not has_tokenizer(local):
            raise absent(repo, local, TOKENIZER_FILES[:1], key="tokenizer")
    check_files(local, path)
    with named_panics(path):
        return _loaded(local, path, note)


def _loaded(local: Path, path: str, note: Callable[[str], None]) -> PreTrainedTokenizerBase:
    # Up to version 5.23 or so, transformers imports scikit-learn here, with SciPy and pandas: for assisted generation.
    # A version that takes more of it fails, and is imported as it is below.
    with suppress(Exception), imported_when_called("sklearn.metrics"), distributions_when_asked():
        quick_import("transformers.models.auto.tokenization_auto")
    from transformers import AutoTokenizer

    try:
        with _quiet_about_models():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(local), trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise OSError, ValueError, KeyError and bare Exception
        if (fault := _config_fault(local)) == f"{type(error).__name__}: {_first_line(error)}":
            raise UserError(
                f"tokenizer {path}: transformers reads config.json beside it, and cannot: {fault}. "
                f"Fix: correct {local / 'config.json'}, or set `tokenizer` to a directory without it."
            ) from error
        raise UserError(
            f"tokenizer {path}: cannot be loaded: {_first_line(error)}. Fix: check that its files are complete."
        ) from error
    if not tokenizer.is_fast and tokenizer_file.samples(local):
        raise UserError(
            f"tokenizer {path}: tokenizer_config.json has enable_sampling, so a text has other tokens each time. "
            f"Fix: set sp_model_kwargs.enable_sampling to false there."
        )
    tokenizer, differing = tokenizer_file.as_in_file(tokenizer, local)
    if differing:
        note(
            f"tokenizer {path}: transformers replaces its {', '.join(differing)} by those of another class; "
            f"tokenizer.json is used as it is."
        )
    if tokenizer_file.without_dropout(tokenizer):
        note(f"tokenizer {path}: tokenizer.json has BPE dropout, which is off here: a text always has the same tokens.")
    # Without its vocabulary file transformers hands out a tokenizer that knows its special tokens only.
    if vocabulary_size(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise UserError(f"tokenizer {path}: its vocabulary is missing. Fix: add tokenizer.json to it.")
    return tokenizer


@contextmanager
def _quiet_about_models() -> Iterator[None]:
    """Drop transformers' warning that it has no model of this ``model_type``: the model is a family's, and transformers
    reads ``config.json`` for the class of the tokenizer alone.
    """
    logger = logging.getLogger("transformers.configuration_utils")

    def concerns_tokenizers(record: logging.LogRecord) -> bool:
        return "You are using a model of type" not in record.getMessage()

    logger.addFilter(concerns_tokenizers)
    try:
        yield
    finally:
        logger.removeFilter(concerns_tokenizers)


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of its tokens, added ones included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # The vocabulary itself would become a dictionary of Python for a tenth of a second.
    return len(tokenizer.get_vocab()) if backend is None else int(backend.get_vocab_size(with_added_tokens=True))


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise `UserError` when the tokenizer has ids that the model's embedding has no row for."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise UserError(
            f"The tokenizer has token ids up to {largest} but the model's vocabulary has {vocab_size} entries "
            f"(ids 0 to {vocab_size - 1}). Fix: set `tokenizer` to the one that belongs to the model, or for a model "
            f"from scratch set model.config.vocab_size={_round_up(largest + 1, 64)}."
        )


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what decides how the tokenizer encodes: vocabulary, rules, special tokens, chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: Any = {"vocabulary": tokenizer.get_vocab()} if backend is None else _rules(backend.to_str())
    content = {
        "class": type(tokenizer).__name__,
        "backend": rules,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
        "bos": getattr(tokenizer, "add_bos_token", None),
        "eos": getattr(tokenizer, "add_eos_token", None),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _rules(text: str) -> str:
    """The text of a tokenizer.json without truncation and padding: settings of the last call, not of the tokenizer.

    It is not parsed, which would take half a second for a large vocabulary. tokenizers writes the two settings first,
    and always writes equal tokenizers alike.
    """
    _, key, rest = text.partition('"added_tokens":')
    assert key, "tokenizers writes the added tokens after the settings of a call"
    return rest


def turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template ends an assistant's turn with; None where it does not show."""
    from surogate_core.data.text.chat import chat_of

    if not tokenizer.chat_template:
        return None
    try:
        chat = chat_of(tokenizer)
    except ValueError:  # only named templates, none of them for every conversation
        return None
    ids = tokenizer(chat.frame().ending, add_special_tokens=False)["input_ids"]
    return ids[0] if ids and ids[0] in chat.encoder.special_ids else None


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills padding; it carries no loss and nothing attends to it."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


def _config_fault(local: Path) -> str | None:
    """Why transformers cannot read the ``config.json`` of a directory; None if it can, or there is none."""
    from transformers import AutoConfig

    if not (local / "config.json").is_file():
        return None
    try:
        AutoConfig.from_pretrained(str(local), trust_remote_code=False)
    except Exception as error:  # whatever a class of configurations raises for its values
        return f"{type(error).__name__}: {_first_line(error)}"
    return None


def _first_line(error: BaseException) -> str:
    """Without the full stop at its end; with escapes for what a terminal would interpret, as it may quote the file."""
    lines = str(error).strip().splitlines()
    return printable(lines[0].removesuffix(".")) if lines else type(error).__name__


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
