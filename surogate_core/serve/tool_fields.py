"""Fields of a chat that name tools and the form of its answer, and messages with calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from surogate_core.data.calls import CallError, template_call
from surogate_core.serve.refusals import RequestError

MOST_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
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
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise _wrong("tools", f"must be a list of at most {MOST_TOOLS} tools")
    seen: set[str] = set()
    for place, tool in enumerate(value):
        where = f"tools[{place}]"
        if not isinstance(tool, Mapping):
            raise _wrong(where, 'must be an object, {"type": "function", "function": {"name": …, "parameters": …}}')
        if tool.get("type") != "function":
            raise _wrong(f"{where}.type", "must be function, the only kind of tool here")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _wrong(f"{where}.function", 'must be an object, {"name": …, "parameters": …}')
        _check_function(function, f"{where}.function")
        if function["name"] in seen:
            raise _wrong(f"{where}.function.name", f"another tool is called {function['name']} too")
        seen.add(function["name"])
    return value


def _check_function(function: Mapping[str, Any], where: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{where}.name", "must be 1 to 64 letters, digits, dashes, dots and underscores")
    if not isinstance(function.get("description") or "", str):
        raise _wrong(f"{where}.description", "must be text")
    if not isinstance(function.get("strict") or False, bool):
        raise _wrong(f"{where}.strict", "must be true or false")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _wrong(f"{where}.parameters", "must be a JSON schema, an object")
    if parameters and parameters.get("type", "object") != "object":
        raise _wrong(f"{where}.parameters.type", "must be object, since arguments have names")
    known = ("name", "description", "parameters", "strict")
    if wrong := [key for key in function if key not in known]:
        near = get_close_matches(wrong[0], known, n=1)
        fix = f" Fix: {near[0]}" if near else f" Fix: {', '.join(known)}"
        raise RequestError(f"{where}.{wrong[0][:100]}: there is no such field.{fix}", param=f"{where}.{wrong[0][:100]}")


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
    found = []
    for place, call in enumerate(value):
        inner = ".function" if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) else ""
        try:
            found.append(template_call(call))
        except CallError as error:
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
