"""What tokenizer.json says, compared with what transformers made of it.

transformers gives some directories the normaliser and the pre-tokenizer of a class: those with model_type qwen2, or
with the name of a class whose rules it knows. The file is what the model was trained with and what other programs read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.files.tokenizers import read_once

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"

_VOCABULARIES: dict[str, dict[str, Any]] = {
    "BPE": {"vocab": {}, "merges": []},
    "Unigram": {"vocab": [["?", 0.0]], "unk_id": 0},
}
"""A model without its vocabulary, by its type; any other has a `vocab` alone."""
_SETTINGS = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "max_input_chars_per_word",
)
"""Settings of a model that decide about ids, besides its vocabulary."""
_OF_OFFSETS = "trim_offsets"


def as_in_file(tokenizer: PreTrainedTokenizerBase, directory: Path) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """The tokenizer, read anew if it differs from its tokenizer.json, and the parts that differed.

    `tokenizer` keeps its special tokens and chat template.
    """
    content = _read(directory / FILE)
    if not isinstance(content.get("model"), dict) or not tokenizer.is_fast:
        return tokenizer, []
    differing = _differing(tokenizer, content, directory)
    if not differing:
        return tokenizer, []
    from transformers import PreTrainedTokenizerFast

    with _quiet():
        found: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(str(directory))
    known = found.get_vocab()
    for name, token in tokenizer.special_tokens_map.items():
        if name.endswith("_token") and getattr(found, name, token) is None and str(token) in known:
            setattr(found, name, token)
    found.chat_template = tokenizer.chat_template
    return found, differing


def without_dropout(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Switch off BPE dropout, which encodes a text differently each time; whether it was on."""
    model: Any = tokenizer.backend_tokenizer.model if tokenizer.is_fast else None
    if not getattr(model, "dropout", None):
        return False
    model.dropout = None
    return True


def samples(directory: Path) -> bool:
    """Whether tokenizer_config.json makes SentencePiece encode a text differently each time."""
    options = _read(directory / CONFIG).get("sp_model_kwargs")
    return isinstance(options, dict) and bool(options.get("enable_sampling"))


def _differing(tokenizer: PreTrainedTokenizerBase, content: Mapping[str, Any], directory: Path) -> list[str]:
    """Names of the parts of tokenizer.json that the loaded tokenizer has otherwise."""
    wanted, loaded = _bare(content), tokenizer.backend_tokenizer
    found = [
        name.replace("_", "-") if name == "pre_tokenizer" else name
        for name in ("normalizer", "pre_tokenizer")
        if _state(getattr(wanted, name)) != _state(getattr(loaded, name))
    ]
    if wanted.decoder is not None and type(wanted.decoder) is not type(loaded.decoder):
        found.append("decoder")
    before, after = wanted.model, loaded.model
    if type(before) is not type(after) or any(_setting(before, n) != _setting(after, n) for n in _SETTINGS):
        found.append("model")
    # A model of another kind may be unable to encode the text.
    elif not _says_itself(directory) and _added(wanted, loaded) != _added(loaded, loaded):
        found.append("post-processor")
    return found


def _bare(content: Mapping[str, Any]) -> Tokenizer:
    """The file's tokenizer without a vocabulary, which would take seconds."""
    from tokenizers import Tokenizer

    model = content["model"]
    small = _VOCABULARIES.get(model.get("type") or "BPE", {"vocab": {}})
    return Tokenizer.from_str(json.dumps({**content, "added_tokens": [], "model": {**model, **small}}))


def _state(part: Any) -> Any:
    """What a part does, without what concerns offsets only."""
    return None if part is None else _without_offsets(json.loads(part.__getstate__()))


def _without_offsets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_offsets(inner) for name, inner in value.items() if name != _OF_OFFSETS}
    return [_without_offsets(inner) for inner in value] if isinstance(value, list) else value


def _added(rules: Tokenizer, loaded: Tokenizer) -> list[int]:
    """The ids of a text with the special tokens that the rules put around it."""
    encoding = loaded.encode("a", add_special_tokens=False)
    return list((rules.post_processor.process(encoding) if rules.post_processor is not None else encoding).ids)


def _says_itself(directory: Path) -> bool:
    """Whether tokenizer_config.json decides about special tokens around texts."""
    return bool(_read(directory / CONFIG).keys() & {"add_bos_token", "add_eos_token"})


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_once(path)
    except (FileNotFoundError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _setting(model: Any, name: str) -> Any:
    return getattr(model, name, None) or None  # an empty prefix is none


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers logs about the class that the directory names."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
