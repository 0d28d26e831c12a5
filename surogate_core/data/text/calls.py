"""Tool calls in messages, as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from surogate_core.data.encoded import RowError
from surogate_core.data.fields import from_json


class CallError(RowError):
    """A call that no template can write, and the key of it that is wrong."""

    def __init__(self, reason: str, key: str = ""):
        super().__init__(reason)
        self.key = key


def template_call(call: Any, name: str = "a tool call") -> dict[str, Any]:
    """The call with its arguments as an object: templates write those as JSON, and would quote JSON text once more.

    OpenAI puts name and arguments into ``function``, others into the call itself. Raises `CallError`.
    """
    if not isinstance(call, Mapping):
        raise CallError(f"{name} must be an object, this is {type(call).__name__}")
    inner = call.get("function")
    holder = dict(inner) if isinstance(inner, Mapping) else dict(call)
    arguments = holder.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments, f"arguments of {name}:") if arguments.strip() else {}
        except RowError as error:
            raise CallError(str(error), "arguments") from error
    if arguments is not None and not isinstance(arguments, Mapping):
        raise CallError(f"arguments of {name} must be an object, this is {type(arguments).__name__}", "arguments")
    if not isinstance(holder.get("name"), str) or not holder["name"]:
        raise CallError(f"{name} has no name of a function", "name")
    if arguments is not None:
        holder["arguments"] = arguments
    return {**call, "function": holder} if isinstance(inner, Mapping) else holder


def template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a text as content and the arguments of its calls as objects. Other keys stay.

    An assistant's content may be null or missing. Raises `RowError`.
    """
    found = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in found:
        calls = found["tool_calls"]
        if not isinstance(calls, list | tuple):
            raise RowError(f"tool_calls must be a list, this is {type(calls).__name__}")
        found["tool_calls"] = [template_call(call, f"tool call {place}") for place, call in enumerate(calls, start=1)]
    if isinstance(parts := found.get("content"), list | tuple):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
            raise RowError("a part of a content is not text")
        found["content"] = "".join(part["text"] for part in parts)
    if "content" not in found and found.get("role") == "assistant":
        found["content"] = ""
    return found


def text_of_call(call: Mapping[str, Any]) -> str:
    """A call in one line, for people: ``name({…})``."""
    inner = call.get("function")
    holder = inner if isinstance(inner, Mapping) else call
    arguments = holder.get("arguments")
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return f"{holder.get('name')}({shown})"
