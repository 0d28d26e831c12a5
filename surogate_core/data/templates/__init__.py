"""Chat templates: those that ship with Surogate, and putting one onto a tokenizer."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.data.encoded import RowError
from surogate_core.errors import UserError
from surogate_core.files.paths import resolve_package_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURN_ENDS = {
    "chatml": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "llama3": "<|eot_id|>",
    "mistral": None,
    "phi": "<|end|>",
    "phi4": "<|im_end|>",
    "qwen3": "<|im_end|>",
}
"""The shipped templates, and the token that ends a turn; None is the tokenizer's end-of-text token."""

_CONTROL = re.compile(r"<\|\w+\|>")
"""Texts that are special tokens wherever a template writes them."""
_MORE = {
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": ("[INST]", "[/INST]"),
    "phi": ("<|user|>", "<|assistant|>"),
}
"""Further special tokens of shipped templates."""


def template_text(name: str) -> str:
    """The text of a shipped template."""
    return (Path(__file__).parent / f"{name}.jinja").read_text(encoding="utf-8")


def apply_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Give the tokenizer the chat template that the key `template` means; auto leaves its own.

    With a shipped one, the token that ends a turn also becomes the tokenizer's end-of-text token,
    so that generation stops there. Raises `UserError` when there is no such template, it is broken,
    or it needs special tokens that the tokenizer lacks.
    """
    if template == "auto":
        return
    text = template_text(template) if template in TURN_ENDS else _from_file(template)
    end = TURN_ENDS.get(template)
    if end is not None and end in _tokens(tokenizer):
        tokenizer.eos_token = end
    needed = dict.fromkeys([*_CONTROL.findall(text), *_MORE.get(template, ())])
    missing = [token for token in needed if token not in _tokens(tokenizer)]
    missing += [name for name in ("bos_token", "eos_token") if name in text and not getattr(tokenizer, name)]
    if missing:
        raise UserError(
            f"template {template}: the tokenizer {tokenizer.name_or_path} lacks special tokens that it needs: "
            f"{', '.join(missing)}. Fix: take the template of the model's family ({', '.join(TURN_ENDS)}), "
            f"template: auto for the tokenizer's own, or a tokenizer that has the tokens."
        )
    _check(tokenizer, template, text)
    tokenizer.chat_template = text


def _tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    return frozenset(token.content for token in tokenizer.added_tokens_decoder.values()) | frozenset(
        tokenizer.all_special_tokens
    )


def _from_file(template: str) -> str:
    path = Path(resolve_package_path(template)).expanduser()
    if not path.is_file():
        close = difflib.get_close_matches(template, TURN_ENDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"name one of auto, {', '.join(TURN_ENDS)}, or a .jinja file."
        raise UserError(f"template {template}: there is neither such a template nor such a file. Fix: {hint}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"template {template}: cannot be read: {error}. Fix: a UTF-8 text file of Jinja.") from error
    if not text.strip():
        raise UserError(f"template {template}: the file is empty. Fix: write a Jinja chat template into it.")
    return text


def _check(tokenizer: PreTrainedTokenizerBase, template: str, text: str) -> None:
    """Raise `UserError` for a template that is no Jinja, or does not show what is said."""
    from jinja2 import TemplateSyntaxError

    from surogate_core.data.text.chat import Chat

    asked, answered = "What is it?", "It is this."
    try:
        rendered = Chat(tokenizer, text).render(
            [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        )
    except RowError as error:
        cause = error.__cause__
        line = f" line {cause.lineno}:" if isinstance(cause, TemplateSyntaxError) else ""
        raise UserError(
            f"template {template}:{line} {error}. Fix: mend it; a user turn and an assistant turn must be accepted."
        ) from error
    if asked not in rendered or answered not in rendered:
        raise UserError(
            f"template {template}: it drops the text of the user or of the assistant. "
            f"Fix: make it write `message.content` of each of `messages`."
        )
