"""Calls that are JSON: the forms of Qwen and Hermes, of Llama 3 and of Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surogate_core.bundles import Tag, ToolParserSpec, ToolPart
from surogate_core.tools.rules import alternatives, json_rule, quoted

LONGEST_HEAD = 1000
"""Characters of a call among which its name is looked for before the call is whole."""
LONGEST_TAIL = 200
"""Characters between the arguments of a call and its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a family writes calls, each of which is an object with ``name`` and `key`."""

    opening: str
    """What begins the calls, or each of them."""
    key: str = "arguments"
    closing: str
    """What ends them; empty where only the end of the completion does."""
    between: str = ""
    """What is between two calls, unless each has an opening of its own."""
    listed: bool = False
    """Whether calls are in a list, or are a name with ``[ARGS]`` and an object."""
    alone: bool = False
    """Whether calls are the whole completion, with the opening or without it."""


class Balance:
    """Finds the end of a JSON object that comes in pieces."""

    _signs = re.compile(r'[\\"{}\[\]]')

    def __init__(self) -> None:
        self._depth, self._quoted, self._skipped = 0, False, -1

    def end(self, text: str) -> int | None:
        """Characters of this next piece that belong to the object, if it ends in it."""
        for found in self._signs.finditer(text):
            sign, place = found[0], found.start()
            if place == self._skipped:
                continue
            if self._quoted:
                if sign == "\\":
                    self._skipped = place + 1
                self._quoted = sign != '"'
            elif sign == '"':
                self._quoted = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        self._skipped -= len(text)
        return None


class JsonCalls:
    """The parser of a form."""

    def __init__(self, form: Form):
        self._form = form
        self._state = self._beginning if form.alone else self._content
        self._rest, self._held = "", ""
        """Characters that are not given yet, and before them those of the call that begins."""
        self._balance = Balance()
        self._scanned = 0
        """Characters of the rest that `_balance` has seen."""
        self._id, self._bare = "", False
        """The id that the model gave the call; whether the call is a name with an object."""
        value = r'"(?:[^"\\]|\\.)*"'
        self._head = re.compile(rf'\s*\{{\s*"name"\s*:\s*({value})\s*,\s*"{form.key}"\s*:\s*(?=\{{)')
        self._named = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")
        self._tail = re.compile(rf'\s*(?:,\s*"id"\s*:\s*({value})\s*)?\}}')

    def feed(self, text: str) -> Iterator[ToolPart]:
        """See `ToolParser`."""
        self._rest += text
        while (parts := self._state()) is not None:
            yield from parts

    def close(self) -> Iterator[ToolPart]:
        """See `ToolParser`."""
        blank = not self._rest.strip()
        text, self._rest = self._held + self._rest, ""
        if self._state == self._after and not self._form.closing and blank:
            yield ToolPart(kind="end", text=text, value=self._id)
        elif self._state in (self._content, self._beginning):
            if text:
                yield ToolPart(kind="content", text=text)
        else:
            yield ToolPart(kind="broken", text=text)

    # ------------------------------------------------- states: parts, or None to wait for more

    def _beginning(self) -> list[ToolPart] | None:
        """The beginning of a completion that may be calls as a whole."""
        text, opening = self._rest.lstrip(), self._form.opening
        if not text or (len(text) < len(opening) and opening.startswith(text)):
            return None
        if text.startswith((opening, "{")):
            return self._begin(len(self._rest) - len(text) + (len(opening) if text.startswith(opening) else 0))
        self._state = self._content
        return []

    def _content(self) -> list[ToolPart] | None:
        opening = self._form.opening
        place = -1 if self._form.alone else self._rest.find(opening)
        if place >= 0:
            found = self._given(place)
            self._begin(len(opening))
            return found
        most = 0 if self._form.alone else min(len(opening) - 1, len(self._rest))
        kept = next((n for n in range(most, 0, -1) if self._rest.endswith(opening[:n])), 0)
        return self._given(len(self._rest) - kept) or None

    def _given(self, count: int) -> list[ToolPart]:
        text, self._rest = self._rest[:count], self._rest[count:]
        return [ToolPart(kind="content", text=text)] if text else []

    def _begin(self, count: int) -> list[ToolPart]:
        """A call begins behind these characters."""
        self._held, self._rest = self._held + self._rest[:count], self._rest[count:]
        self._balance, self._scanned, self._id, self._bare = Balance(), 0, "", False
        self._state = self._listed if self._form.listed else self._name
        return []

    def _listed(self) -> list[ToolPart] | None:
        """The beginning of a list, or the name of a call without one."""
        text = self._rest.lstrip()
        if not text:
            return None
        if text.startswith("["):
            self._begin(len(self._rest) - len(text) + 1)
            self._state = self._name
            return []
        if found := self._named.match(self._rest):
            self._id, self._bare = found[2] or "", True
            return self._called(found.end(), found[1])
        return self._broken() if len(text) > LONGEST_TAIL or not re.match(r"[\w.\-\[\]\s]+$", text) else None

    def _name(self) -> list[ToolPart] | None:
        """The head of an object, or an object whose keys have another order."""
        if len(self._rest) <= LONGEST_HEAD and (found := self._head.match(self._rest)):
            name = _loaded(found[1])
            return self._called(found.end(), name) if isinstance(name, str) else self._broken()
        if (text := self._rest.lstrip()) and not text.startswith("{"):
            return self._broken()
        end = self._balance.end(self._rest[self._scanned :])
        if end is None:
            self._scanned = len(self._rest)
            return None
        end += self._scanned
        value = _loaded(self._rest[:end])
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return self._broken()
        arguments = json.dumps(value.get(self._form.key) or {}, ensure_ascii=False)
        self._id = value["id"] if isinstance(value.get("id"), str) else ""
        parts = self._called(end, value["name"])
        self._state = self._after
        return [*parts, ToolPart(kind="arguments", text="", value=arguments)]

    def _called(self, count: int, name: str) -> list[ToolPart]:
        text, self._rest, self._held = self._held + self._rest[:count], self._rest[count:], ""
        self._balance, self._state = Balance(), self._arguments
        return [ToolPart(kind="name", text=text, value=name)]

    def _arguments(self) -> list[ToolPart] | None:
        if not self._rest:
            return None
        end = self._balance.end(self._rest)
        text, self._rest = self._rest[:end], self._rest[len(self._rest) if end is None else end :]
        if end is not None:
            self._state = self._after if self._bare else self._closing
        return [ToolPart(kind="arguments", text=text, value=text)]

    def _closing(self) -> list[ToolPart] | None:
        """The rest of the call's object."""
        if found := self._tail.match(self._rest):
            self._id = str(_loaded(found[1])) if found[1] else ""
            self._held, self._rest = found[0], self._rest[found.end() :]
            self._state = self._after
            return []
        text = self._rest.lstrip()
        return self._broken() if len(text) > LONGEST_TAIL or text[:1] not in ("", ",") else None

    def _after(self) -> list[ToolPart] | None:
        """What ends a call, or separates it from the next."""
        if self._bare:
            return self._ended(0, self._content)
        text, form = self._rest.lstrip(), self._form
        blank = len(self._rest) - len(text)
        for sign, state in ((form.closing, self._content), (form.between, self._name)):
            if sign and text.startswith(sign):
                parts = self._ended(blank + len(sign), self._content)
                if state == self._name:
                    self._begin(0)
                    self._state = self._name
                return parts
        waits = not text or (len(text) < len(form.closing) and form.closing.startswith(text))
        return None if waits else self._broken()

    def _ended(self, count: int, state: Any) -> list[ToolPart]:
        text, self._rest, self._held = self._held + self._rest[:count], self._rest[count:], ""
        self._state = state
        return [ToolPart(kind="end", text=text, value=self._id)]

    def _broken(self) -> list[ToolPart]:
        text, self._held = self._held, ""
        self._state = self._content
        return [ToolPart(kind="broken", text=text)]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# --------------------------------------------------------------------------------- forms

HERMES = Form(opening="<tool_call>", closing="</tool_call>")
LLAMA = Form(opening="<|python_tag|>", closing="", key="parameters", between=";", alone=True)
MISTRAL = Form(opening="[TOOL_CALLS]", closing="]", between=",", listed=True)


def _objects(functions: Sequence[Mapping[str, Any]], key: str) -> str:
    """Rules for a call's object, as templates write it: the rule `one`."""

    def call(function: Mapping[str, Any]) -> str:
        head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        return f"{quoted(head)} {json_rule(function)} {quoted('}')}"

    return alternatives("one", [call(function) for function in functions])


def _hermes(functions: Sequence[Mapping[str, Any]], several: bool, tag: Tag) -> str:
    more = f" ({quoted(chr(10))} call)*" if several else ""
    line = quoted("\n")
    call = f"call: {tag('<tool_call>')} {line} one {line} {tag('</tool_call>')}\n"
    return f"start: call{more}\n{call}{_objects(functions, 'arguments')}"


def _llama(functions: Sequence[Mapping[str, Any]], several: bool, tag: Tag) -> str:
    return f"start: one\n{_objects(functions, 'parameters')}"


def _mistral(functions: Sequence[Mapping[str, Any]], several: bool, tag: Tag) -> str:
    more = f" ({quoted(', ')} one)*" if several else ""
    return f"start: {tag('[TOOL_CALLS]')} {quoted(' [')} one{more} {quoted(']')}\n{_objects(functions, 'arguments')}"


SPECS = (
    ToolParserSpec(
        name="hermes",
        fits=lambda template: "<tool_call>" in template and "<function=" not in template,
        open=lambda functions: JsonCalls(HERMES),
        grammar=_hermes,
        tags=("<tool_call>", "</tool_call>"),
    ),
    ToolParserSpec(
        name="llama3",
        fits=lambda template: (
            '"parameters": ' in template and "<tool_call>" not in template and "[TOOL_CALLS]" not in template
        ),
        open=lambda functions: JsonCalls(LLAMA),
        grammar=_llama,
        tags=("<|python_tag|>",),
    ),
    ToolParserSpec(
        name="mistral",
        fits=lambda template: "[TOOL_CALLS]" in template,
        open=lambda functions: JsonCalls(MISTRAL),
        grammar=_mistral,
        tags=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
)
