"""Answers of the OpenAI API: whole, or in the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from surogate_core.plugin import bundles
from surogate_core.service.inference import Call, Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A chosen token."""

    text: str
    data: bytes
    """Its bytes, which its text does not have if it is a part of a character."""
    logprob: float
    offset: int
    """Where it begins in the text, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A completion, or the next part of one."""

    index: int
    text: str
    tokens: Sequence[Token] | None = None
    """Its tokens, if the request asks for log-probabilities."""
    calls: Sequence[Call] = ()
    """Its tool calls, of a whole answer."""
    deltas: Sequence[Delta] = ()
    """The parts of its calls, of a stream."""
    reason: bundles.Reason | Literal["tool_calls"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Numbers of tokens."""

    prompt: int
    completion: int

    def body(self) -> dict[str, int]:
        """As JSON."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one request; all its chunks have the same id."""

    chat: bool
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer at once."""
        found = [self._choice(choice, {"message": _message(choice)}) for choice in choices]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": found, "usage": usage.body()}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a completion of a chat, which has the role."""
        return self._chunk(Choice(index=index, text=""), {"role": "assistant", "content": ""})

    def chunk(self, choice: Choice) -> dict[str, Any]:
        """The next part of a completion."""
        delta: dict[str, Any] = {"content": choice.text} if choice.text else {}
        if choice.deltas:
            delta["tool_calls"] = [one.body() for one in choice.deltas]
        return self._chunk(choice, delta)

    def ending(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, which has the numbers of tokens."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage.body()}

    def _chunk(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [self._choice(choice, {"delta": delta})]}

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, choice: Choice, content: dict[str, Any]) -> dict[str, Any]:
        if self.chat:
            logprobs = None if choice.tokens is None else _chat_logprobs(choice.tokens)
        else:
            content = {"text": choice.text}
            logprobs = None if choice.tokens is None else _logprobs(choice.tokens)
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.reason}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.calls:
        message |= {"content": choice.text or None, "tool_calls": [call.body() for call in choice.calls]}
    return message


def _chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    def one(token: Token) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data), "top_logprobs": []}

    return {"content": [one(token) for token in tokens], "refusal": None}


def _logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": None,
        "text_offset": [token.offset for token in tokens],
    }


def event(body: dict[str, Any] | str) -> bytes:
    """A server-sent event."""
    data = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False, allow_nan=False)
    return f"data: {data}\n\n".encode()
