"""The content and the tool calls of a completion."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surogate_core.bundles import ToolParserSpec, ToolPart

_SIGNS = string.ascii_letters + string.digits
_HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a tool."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""

    def body(self) -> dict[str, Any]:
        """As the OpenAI API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The next part of an answer: of its content, or of the call of a number."""

    content: str = ""
    number: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""

    def body(self) -> dict[str, Any]:
        """A call's part as the OpenAI API has it."""
        head = {"id": self.id, "type": "function"} if self.id else {}
        function = ({"name": self.name} if self.name else {}) | {"arguments": self.arguments}
        return {"index": self.number, **head, "function": function}


class CallReader:
    """Separates the calls from the content while a completion grows.

    A call of another tool, or with arguments that are no JSON object, stays content. So a call is given when it is
    whole, unless the completion is held to a grammar, with which it cannot fail.
    """

    def __init__(
        self, spec: ToolParserSpec, functions: Sequence[Mapping[str, Any]], *, held: bool = False, several: bool = True
    ):
        """`held`: whether a grammar allows calls only. `several`: whether more than one call is read."""
        self._parser, self._names = spec.open(functions), {str(function["name"]) for function in functions}
        self._held, self._several = held, several
        self._parts: list[ToolPart] = []
        """Those of the call that is not whole."""
        self._space = ""
        """White space that belongs to the content, unless a call follows."""
        self.content = ""
        self.calls: list[Call] = []
        self.cut = False
        """Whether the last call has no end."""

    @property
    def over(self) -> bool:
        """Whether what follows is not read."""
        return bool(self.calls) and not self._several and not self._parts

    def feed(self, text: str) -> list[Delta]:
        """What is certain with these next characters."""
        return self._taken(self._parser.feed(text)) if text and not self.over else []

    def close(self) -> list[Delta]:
        """The rest; the completion is over."""
        if self.over:
            return []
        found = self._taken(self._parser.close())
        if self._parts:
            found += self._refused()
        if self._space and not self.calls:
            found += self._given(self._space)
        return found

    def _taken(self, parts: Iterable[ToolPart]) -> list[Delta]:
        found: list[Delta] = []
        for part in parts:
            if self.over:
                break
            if part.kind == "content":
                found += self._written(part.text)
                continue
            if part.kind == "broken":
                found += self._refused(part.text)
                continue
            if _HALF.search(part.value):
                part = replace(part, value=_HALF.sub(_escaped, part.value))
            self._parts.append(part)
            if self._held:
                found += self._going(part)
            elif part.kind == "end":
                found += self._ended()
        return found

    def _written(self, text: str) -> list[Delta]:
        """Content, whose white space at the end waits."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return self._given(kept)

    def _given(self, text: str) -> list[Delta]:
        self.content += text
        return [Delta(content=text)] if text else []

    def _refused(self, more: str = "") -> list[Delta]:
        """What looked like a call is content. A grammar's call that is cut stays a call without its end."""
        if self._held and any(part.kind == "name" for part in self._parts):
            self.cut = True
            return self._held_call()
        parts, self._parts = self._parts, []
        return self._written("".join(part.text for part in parts) + more)

    def _call(self, id: str = "") -> Call:
        name = next((part.value for part in self._parts if part.kind == "name"), "")
        arguments = "".join(part.value for part in self._parts if part.kind == "arguments")
        return Call(id=id or new_id(), name=name, arguments=arguments)

    def _ended(self) -> list[Delta]:
        call = self._call(self._parts[-1].value)
        if call.name not in self._names or not _is_object(call.arguments):
            return self._refused()
        self._parts, self._space = [], ""
        self.calls.append(call)
        number = len(self.calls) - 1
        return [
            Delta(number=number, id=call.id, name=call.name),
            Delta(number=number, arguments=call.arguments),
        ]

    def _going(self, part: ToolPart) -> list[Delta]:
        """A part of a call that cannot fail."""
        if part.kind == "name":
            self._space = ""
            self.calls.append(self._call())
            call = self.calls[-1]
            return [Delta(number=len(self.calls) - 1, id=call.id, name=call.name)]
        if part.kind == "arguments":
            return [Delta(number=len(self.calls) - 1, arguments=part.value)]
        return self._held_call()

    def _held_call(self) -> list[Delta]:
        """The arguments of a call that was given part by part are whole, or cut."""
        self.calls[-1] = self._call(self.calls[-1].id)
        self._parts = []
        return []


def new_id() -> str:
    """An id of a call: nine letters and digits, since the templates of Mistral take no other."""
    return "".join(secrets.choice(_SIGNS) for _ in range(9))


def _escaped(half: re.Match[str]) -> str:
    """Half of a surrogate pair as JSON writes it: a model may write the escape, but it is no text."""
    return f"\\u{ord(half[0]):04x}"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
