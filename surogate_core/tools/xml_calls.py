"""Calls as tags: the form of Qwen3-Coder, ``<function=NAME>`` with a ``<parameter=KEY>`` for each argument."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surogate_core.bundles import Tag, ToolParserSpec, ToolPart
from surogate_core.tools.rules import AS_WRITTEN, alternatives, quoted

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_CALL = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


class XmlCalls:
    """The parser. A call is given when its last tag is there."""

    def __init__(self, functions: Sequence[Mapping[str, Any]]):
        self._kinds = {
            (function["name"], key): schema.get("type") if isinstance(schema, Mapping) else None
            for function in functions
            for key, schema in _properties(function).items()
        }
        self._rest, self._looked = "", 0
        """What is not given yet, and its characters that have no end of a call."""
        self._inside = False

    def feed(self, text: str) -> Iterator[ToolPart]:
        """See `ToolParser`."""
        self._rest += text
        while True:
            tag = CLOSING if self._inside else OPENING
            place = self._rest.find(tag, max(0, self._looked - len(tag)))
            if place < 0:
                break
            end = place if not self._inside else place + len(tag)
            taken, self._rest, self._looked = self._rest[:end], self._rest[end:], 0
            if self._inside:
                yield from self._call(taken)
            elif taken:
                yield ToolPart(kind="content", text=taken)
            self._inside = not self._inside
        self._looked = len(self._rest)
        if not self._inside:
            kept = next((n for n in range(len(OPENING) - 1, 0, -1) if self._rest.endswith(OPENING[:n])), 0)
            given, self._rest = self._rest[: len(self._rest) - kept], self._rest[len(self._rest) - kept :]
            self._looked = 0
            if given:
                yield ToolPart(kind="content", text=given)

    def close(self) -> Iterator[ToolPart]:
        """See `ToolParser`."""
        text, self._rest = self._rest, ""
        if text:
            yield ToolPart(kind="broken" if self._inside else "content", text=text)

    def _call(self, text: str) -> Iterator[ToolPart]:
        found = _CALL.fullmatch(text[len(OPENING) : -len(CLOSING)])
        arguments = None if found is None else self._arguments(found[1], found[2])
        if found is None or arguments is None:
            yield ToolPart(kind="broken", text=text)
            return
        yield ToolPart(kind="name", text=text, value=found[1])
        yield ToolPart(kind="arguments", text="", value=json.dumps(arguments, ensure_ascii=False))
        yield ToolPart(kind="end", text="")

    def _arguments(self, name: str, text: str) -> dict[str, Any] | None:
        arguments: dict[str, Any] = {}
        place = 0
        while place < len(text.rstrip()):
            found = _PARAMETER.match(text, place)
            if found is None:
                return None
            arguments[found[1]] = self._value(name, found[1], found[2])
            place = found.end()
        return arguments

    def _value(self, name: str, key: str, text: str) -> Any:
        """The value of a text: JSON, unless the function has text there, or it is none."""
        if self._kinds.get((name, key)) == "string":
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    found = (function.get("parameters") or {}).get("properties")
    return found if isinstance(found, Mapping) else {}


def _grammar(functions: Sequence[Mapping[str, Any]], several: bool, tag: Tag) -> str:
    more = f" ({quoted(chr(10))} call)*" if several else ""
    call = f"call: {tag(OPENING)} {quoted(chr(10))} one {quoted(chr(10))} {tag(CLOSING)}\n"
    text = r"TEXT: /[^<]*/" + "\n"
    return f"start: call{more}\n{call}{alternatives('one', [_function(one) for one in functions])}{text}"


def _function(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    parts = []
    for key, schema in _properties(function).items():
        schema = schema if isinstance(schema, Mapping) else {}
        words = [schema["const"]] if "const" in schema else schema.get("enum")
        if schema.get("type") != "string":
            value = f"%json {json.dumps({**shared, **schema, 'x-guidance': AS_WRITTEN}, ensure_ascii=False)}"
        elif isinstance(words, list) and words:
            value = f"({' | '.join(quoted(word) for word in words if isinstance(word, str))})"
        else:
            value = "TEXT"
        part = f"{quoted(f'<parameter={key}>{chr(10)}')} {value} {quoted(f'{chr(10)}</parameter>{chr(10)}')}"
        parts.append(part if key in (parameters.get("required") or ()) else f"({part})?")
    head = quoted(f"<function={function['name']}>\n")
    return " ".join([head, *parts, quoted("</function>")])


SPEC = ToolParserSpec(
    name="qwen3-coder",
    fits=lambda template: "<function=" in template and "<tool_call>" in template,
    open=XmlCalls,
    grammar=_grammar,
    tags=(OPENING, CLOSING),
)
