"""Fields of a chat that name tools and the form of its answer, and messages with calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from surogate_command_serve.refusals import RequestError
from surogate_core.plugin import encoding
from surogate_core.service.inference import ToolError, check_tools

_CHOICES = ("none", "auto", "required")
_FORMATS = ("text", "json_object", "json_schema")
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of `json_object`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The tools of a request."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """As the chat template lists them."""
    must: tuple[Mapping[str, Any], ...] = ()
    """The functions of which at least one must be called; empty if an answer may do without."""
    several: bool = True
    """Whether an answer may have more than one call."""

    @property
    def functions(self) -> list[Mapping[str, Any]]:
        """The functions of the tools."""
        return [tool["function"] for tool in self.tools]


def offer(tools: Any, choice: Any, several: Any) -> Offer:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`; raises `RequestError`."""
    if several is not None and not isinstance(several, bool):
        raise _wrong("parallel_tool_calls", "must be true or false")
    found = _tools(tools)
    names = [tool["function"]["name"] for tool in found]
    must: list[str] = []
    if isinstance(choice, Mapping):
        must = [_named(choice, names)]
    elif choice not in (None, *_CHOICES):
        raise _wrong("tool_choice", 'must be none, auto, required, or {"type": "function", "function": {"name": …}}')
    elif choice == "required":
        must = names
    if must == [] and choice == "required":
        raise _wrong("tool_choice", "there are no tools. Fix: tools")
    if choice == "none":
        found = []
    return Offer(
        tools=tuple(found),
        must=tuple(tool["function"] for tool in found if tool["function"]["name"] in must),
        several=several is not False and not isinstance(choice, Mapping),
    )


def _tools(value: Any) -> list[Mapping[str, Any]]:
    try:
        return [] if value is None else check_tools(value)
    except ToolError as error:
        raise RequestError(str(error), param=error.where) from error


def _named(choice: Mapping[str, Any], names: Sequence[str]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise _wrong("tool_choice", 'must be {"type": "function", "function": {"name": …}}')
    if name not in names:
        near = get_close_matches(name, names, n=1) or list(names[:10])
        fix = f"Fix: {', '.join(near)}" if near else "Fix: tools"
        raise _wrong("tool_choice.function.name", f"there is no tool {name[:100]}. {fix}")
    return name


def schema_of(value: Any) -> Mapping[str, Any] | None:
    """The JSON schema of the field `response_format`; None for text. Raises `RequestError`."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in _FORMATS:
        raise _wrong("response_format", f'must be {{"type": …}} with {", ".join(_FORMATS)}')
    if kind != "json_schema":
        return ANY_OBJECT if kind == "json_object" else None
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping):
        raise _wrong("response_format.json_schema", 'must be an object, {"name": …, "schema": …}')
    schema = inner.get("schema")
    if not isinstance(schema, Mapping):
        raise _wrong("response_format.json_schema.schema", "must be a JSON schema, an object")
    return schema


def message_of(place: int, message: Any) -> Mapping[str, Any]:
    """A message whose content is text and whose calls have objects as arguments; raises `RequestError`."""
    param = f"messages[{place}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f'{param}: must be an object with "role" and "content".', param=param)
    found = {key: value for key, value in message.items() if value is not None or key == "content"}
    if found.get("tool_calls") is not None:
        found["tool_calls"] = _calls(found["tool_calls"], f"{param}.tool_calls")
    if not isinstance(found.get("tool_call_id", ""), str):
        raise _wrong(f"{param}.tool_call_id", "must be text")
    content = found.get("content")
    if isinstance(content, list):
        content = _joined(content, f"{param}.content")
    if content is None and found["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise _wrong(f"{param}.content", "must be text")
    return {**found, "content": content}


def _calls(value: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise _wrong(where, "must be a list of calls")
    found: list[Mapping[str, Any]] = []
    for place, call in enumerate(value):
        inner = ".function" if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) else ""
        try:
            found.append(encoding.template_call(call))
        except encoding.CallError as error:
            path = f"{where}[{place}]" + (f"{inner}.{error.key}" if error.key else "")
            raise _wrong(path, str(error)) from error
    return found


def _joined(parts: Sequence[Any], param: str) -> str:
    """The text of a content that is a list of parts."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            shown = kind if isinstance(kind, str) and kind != "text" else "this part"
            raise RequestError(f"{param}: {shown[:50]} is not text, and the models here read text only.", param=param)
        texts.append(part["text"])
    return "".join(texts)


def _wrong(param: str, reason: str) -> RequestError:
    return RequestError(f"{param}: {reason.rstrip('.')}.", param=param)
