"""A prompt and an answer to it, each text or messages, as one document: only the answer is trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.data.encoded import RowError
from surogate_core.data.fields import ROLES, from_json, listed, require_unicode, required, required_text
from surogate_core.data.text.calls import CallError, template_call
from surogate_core.data.text.chat import with_default_system
from surogate_core.errors import UserError

if TYPE_CHECKING:
    from surogate_core.data.encoded import EncodeContext, Encoded

Messages = list[dict[str, Any]]
"""A conversation: each message with `role` and `content`."""

_BEGINNING = re.compile(r'\s*\[\s*\{\s*"role"\s*:')
"""How a list of messages begins: one that ends too early is no text."""


def text_or_messages(row: Mapping[str, Any], field: str) -> str | Messages:
    """A field's text, or its messages. Raises `RowError` where it has neither, or an empty one.

    A text that is JSON is text, unless it is a list of messages: CSV holds these so.
    """
    value = required(row, field)
    if isinstance(value, str):
        value = _messages_in(value, field) or value
    value = listed(value)
    if not isinstance(value, list):
        return required_text(row, field)
    if not value:
        raise RowError(f"field {field!r} is empty")
    return [_message(place, message, field) for place, message in enumerate(value, start=1)]


def _messages_in(text: str, field: str) -> list[Any] | None:
    """The messages that a text writes as JSON, if it does."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = from_json(text, f"field {field!r} begins like a list of messages, and")
    except RowError:
        if _BEGINNING.match(text):
            raise
        return None
    return value if isinstance(value, list) and all(map(_is_message, value)) else None


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("role") in ROLES and ("content" in value or "tool_calls" in value)


def _message(place: int, raw: Any, field: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("role"), str):
        raise RowError(f'field {field!r}: item {place} is no message; want {{"role": …, "content": …}}')
    message = {name: value for name, value in raw.items() if value is not None}
    if "tool_calls" in message:
        calls = listed(message["tool_calls"])
        if not isinstance(calls, list):
            raise RowError(f"field {field!r}: tool_calls of message {place} must be a list of objects")
        try:
            message["tool_calls"] = [template_call(call, f"tool call {n}") for n, call in enumerate(calls, start=1)]
        except CallError as error:
            raise RowError(f"field {field!r}: message {place}: {error}") from error
    content = message.get("content")
    if isinstance(content, str):
        require_unicode(content, f"field {field!r}: message {place}")
    elif content is not None or "tool_calls" not in message:
        raise RowError(f"field {field!r}: the content of message {place} is no text")
    return message


def check_answer(answer: str | Messages, field: str) -> None:
    """Raise `RowError` for messages that do not end with something that the assistant says."""
    if isinstance(answer, list) and (answer[-1]["role"] != "assistant" or not _says_something(answer[-1])):
        raise RowError(f"field {field!r} does not end with a message of the assistant that has text")


def _says_something(message: Mapping[str, Any]) -> bool:
    return bool(str(message.get("content") or "").strip()) or bool(message.get("tool_calls"))


def encode_answer(prompt: str | Messages, answer: str | Messages, context: EncodeContext) -> Encoded:
    """The prompt and the answer; the answer and the token that ends it are trained.

    With a chat template, texts are a user's and an assistant's message; without one the answer follows the prompt
    directly. Raises `RowError` if the template does not take the messages, and `UserError` for messages without a
    template.
    """
    from surogate_core.data.text.labels import Override, tokenize_completion, tokenize_conversation

    if isinstance(prompt, str) and isinstance(answer, str):
        if not context.tokenizer.chat_template or not context.use_chat_template:
            return tokenize_completion(context.tokenizer, prompt, answer)
    elif not context.use_chat_template:
        raise UserError(
            "use_chat_template is false, but the data has messages, which only a chat template can render. "
            "Fix: use_chat_template: true, or rows of texts."
        )
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    added = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    with_default_system(asked, context)
    overrides = [Override(train=False)] * len(asked)
    overrides += [Override(train=message["role"] == "assistant") for message in added]
    return tokenize_conversation(context.tokenizer, [*asked, *added], overrides=overrides)
