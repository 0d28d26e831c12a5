"""A text with the special tokens around it: those that the tokenizer puts before every text, and the end of the text.

Rows, prompts and answers are encoded here, so that a text that writes such a token itself does not get it twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.data.text.chat import encode_text, encoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_whole(tokenizer: PreTrainedTokenizerBase, text: str, *, ended: bool) -> list[int]:
    """The ids of a text from its beginning. `ended`: and the token that ends a text; otherwise something follows.

    A text that begins with the first special token, or ends with the last, gets no second one; white space outside of
    them is left out.
    """
    encoder = encoder_of(tokenizer)
    begin, end = encoder.begin, encoder.end
    inner = text.lstrip()
    if inner != text and inner.startswith(tuple(str(token) for token in tokenizer.convert_ids_to_tokens(list(begin)))):
        text = inner
    if ended:
        text = _trimmed(tokenizer, text)
    ids = encode_text(tokenizer, text)
    ids = ids[len(begin) : len(ids) - len(end)]
    if not (ids and ids[0] in begin):
        ids = [*begin, *ids]
    return _ended(tokenizer, ids, end) if ended else ids


def encode_rest(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text that follows another, and the token that ends a text."""
    ids = encode_text(tokenizer, _trimmed(tokenizer, text), add_special_tokens=False)
    return _ended(tokenizer, ids, ())


def _trimmed(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text without the white space behind its last token, if that ends texts."""
    inner = text.rstrip()
    return inner if tokenizer.eos_token and inner.endswith(str(tokenizer.eos_token)) else text


def _ended(tokenizer: PreTrainedTokenizerBase, ids: list[int], end: tuple[int, ...]) -> list[int]:
    eos = tokenizer.eos_token_id
    if ids and ids[-1] == eos:
        return ids
    ids = [*ids, *end]
    return [*ids, eos] if isinstance(eos, int) and (not ids or ids[-1] != eos) else ids
