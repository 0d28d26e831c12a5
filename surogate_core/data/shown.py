"""Finds the texts that a chat template drops from a conversation. The model would be trained as if they did not exist.

The conversation is rendered with a mark in place of each text. A mark that is missing from the result belongs to a
text that the template drops. The answer depends on the conversation's shape only (its roles, properties and calls), so
one more rendering serves all rows of a shape.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surogate_core.data.encoded import RowError

if TYPE_CHECKING:
    from surogate_core.data.chat import Chat, Messages, Tools

KEPT_VERDICTS = 4096
"""Shapes of conversations whose answer a template keeps."""
LISTED = 3
"""Largest number of texts that an error names; it counts the others."""

METADATA = re.compile(r"(^|_)(id|ids|uuid|hash|index|date|time|timestamp)$|^(created|updated)|[a-z](Id|Ids|At)$")
"""Properties of a message that describe it and are not part of a prompt: ids, hashes, places, dates and times."""

_CALLS, _THOUGHT, _TOOLS = "tool_calls", "<think>", "tools"
_PLAIN = frozenset(("role", "content"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """One text of the conversation and the marks in its place."""

    name: str
    """The property; for a thought that is written inside the content `<think>`."""
    turn: int
    """Its message; -1 for the tools."""
    marks: tuple[str, ...]
    needs_all: bool
    """Whether each of the marks must be shown, or any one of them."""

    def is_in(self, rendered: str) -> bool:
        shown = (mark in rendered for mark in self.marks)
        return all(shown) if self.needs_all else any(shown)


@dataclass(slots=True)
class _Probe:
    """A conversation with marks in place of its texts."""

    messages: list[Mapping[str, Any]]
    tools: Tools
    texts: list[_Text] = field(default_factory=list)
    marks: int = 0

    def mark(self) -> str:
        # Letters and digits: nothing that a template escapes, trims or takes apart.
        self.marks += 1
        return f"q0x{self.marks}x0q"

    def add(self, name: str, turn: int, marks: Sequence[str], *, needs_all: bool = False) -> None:
        if marks:
            self.texts.append(_Text(name=name, turn=turn, marks=tuple(marks), needs_all=needs_all))


def check_shown(chat: Chat, messages: Messages, tools: Tools) -> None:
    """Raise a `RowError` that names the texts that the chat template drops from the conversation.

    Must be shown: each content, the name and the arguments of each tool call, the name and the description of each
    tool, and whatever text a message has besides. A thought may be left out of earlier turns, as Qwen3's template
    does, where the template shows it in the last one.
    """
    shape = (tuple(_shape(messages, turn) for turn in range(len(messages))), _tools_shape(tools))
    verdict = chat.verdicts.get(shape)
    if verdict is None:
        if len(chat.verdicts) >= KEPT_VERDICTS:
            chat.verdicts.clear()
        verdict = chat.verdicts[shape] = _verdict(chat, messages, tools)
    if verdict:
        raise RowError(verdict)


# ---------------------------------------------------------------------------------- shapes


def _shape(messages: Messages, turn: int) -> Hashable:
    """Everything except the template that decides whether a message's texts are shown."""
    message = messages[turn]
    role, content = message["role"], message.get("content")
    thinks = role == "assistant" and isinstance(content, str) and "</think>" in content
    if message.keys() <= _PLAIN:
        return (role, thinks, bool(content)) if thinks or not content else role
    others = tuple(
        (name, _calls_shape(value) if name == _CALLS else _has_text(value))
        for name, value in sorted(message.items())
        if name not in _PLAIN and not _is_metadata(messages, turn, name)
    )
    return role, thinks, bool(content), others


def _calls_shape(calls: Any) -> Hashable:
    if not isinstance(calls, list):
        return _has_text(calls)
    return tuple(
        (tuple(sorted(call)), tuple(sorted(_function(call))), bool(_function(call).get("arguments")))
        if isinstance(call, Mapping)
        else None
        for call in calls
    )


def _tools_shape(tools: Tools) -> Hashable:
    return tuple(
        (tuple(sorted(tool)), tuple(sorted(_function(tool)))) if isinstance(tool, Mapping) else None
        for tool in tools or ()
    )


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object that has the name: OpenAI's `function`, or the object itself."""
    inner = call.get("function")
    return inner if isinstance(inner, Mapping) else call


def _is_metadata(messages: Messages, turn: int, name: str) -> bool:
    if METADATA.search(name):
        return True
    message = messages[turn]
    # The call that a result belongs to has its name already.
    return name == "name" and message["role"] == "tool" and message["name"] in _called(messages[:turn])


def _called(messages: Messages) -> Iterator[Any]:
    for message in messages:
        for call in message.get(_CALLS) or ():
            if isinstance(call, Mapping):
                yield _function(call).get("name")


def _has_text(value: Any) -> bool:
    """Whether a string in the value is more than white space; numbers and truth values are no text."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):
        return any(_has_text(inner) for inner in value.values())
    return isinstance(value, list | tuple) and any(_has_text(inner) for inner in value)


# --------------------------------------------------------------------------------- verdicts


def _verdict(chat: Chat, messages: Messages, tools: Tools) -> str:
    """The dropped texts, as the reason of a bad row; empty if the template shows everything."""
    probe = _probe(messages, tools)
    try:
        rendered = chat.render(probe.messages, probe.tools)
        missing = [text for text in probe.texts if not text.is_in(rendered)]
    except RowError:  # the template looks into one of the texts
        missing = [text for text in probe.texts if not _is_shown_alone(chat, messages, tools, probe, text)]
    kept = {text.name for text in _first_of_each_name(missing) if _is_shown_last(chat, probe, text)}
    missing = [text for text in missing if text.turn < 0 or text.name not in kept]
    return _reason(messages, missing) if missing else ""


def _is_shown_alone(chat: Chat, messages: Messages, tools: Tools, probe: _Probe, text: _Text) -> bool:
    """Whether the text is shown if only it has marks, for a template that looks into other texts."""
    swapped = [*messages]
    if text.turn >= 0:
        name = "content" if text.name == _THOUGHT else text.name
        swapped[text.turn] = {**messages[text.turn], name: probe.messages[text.turn][name]}
    try:
        return text.is_in(chat.render(swapped, probe.tools if text.turn < 0 else tools))
    except RowError:
        return True


def _first_of_each_name(missing: Sequence[_Text]) -> Iterator[_Text]:
    """The texts that a template may drop from earlier turns: an assistant's texts except its contents and calls."""
    seen = {"content", _CALLS, _TOOLS}
    for text in missing:
        if text.name not in seen:
            seen.add(text.name)
            yield text


def _is_shown_last(chat: Chat, probe: _Probe, text: _Text) -> bool:
    if probe.messages[text.turn]["role"] != "assistant":
        return False
    try:
        return text.is_in(chat.render(probe.messages[: text.turn + 1], probe.tools))
    except RowError:
        return False


def _probe(messages: Messages, tools: Tools) -> _Probe:
    probe = _Probe(messages=[], tools=None)
    if tools:
        probe.tools = [_marked_tool(probe, tool) for tool in tools]
    for turn, message in enumerate(messages):
        swapped: dict[str, Any] = {}
        for name, value in message.items():
            if name == "role" or not _has_text(value) or _is_metadata(messages, turn, name):
                swapped[name] = value
            elif name == "content":
                swapped[name] = _marked_content(probe, turn, message)
            elif name == _CALLS and isinstance(value, list):
                marks: list[str] = []
                swapped[name] = [_marked_call(probe, call, marks) for call in value]
                probe.add(name, turn, marks, needs_all=True)
            else:
                marks = []
                swapped[name] = _marked(probe, value, marks)
                probe.add(name, turn, marks)
        probe.messages.append(swapped)
    return probe


def _marked_content(probe: _Probe, turn: int, message: Mapping[str, Any]) -> Any:
    content = message["content"]
    if not isinstance(content, str):
        return content
    mark = probe.mark()
    probe.add("content", turn, [mark])
    if message["role"] != "assistant" or "</think>" not in content:
        return mark
    thought = probe.mark()
    probe.add(_THOUGHT, turn, [thought])
    return f"<think>\n{thought}\n</think>\n\n{mark}"


def _marked_call(probe: _Probe, call: Any, marks: list[str]) -> Any:
    """The call with marks for its name and for one argument."""
    if not isinstance(call, Mapping):
        return _marked(probe, call, marks)
    function = dict(_function(call))
    if function.get("name"):
        function["name"] = probe.mark()
        marks.append(function["name"])
    if arguments := function.get("arguments"):
        mark = probe.mark()
        marks.append(mark)
        function["arguments"] = mark if isinstance(arguments, str) else {"argument": mark}
    return {**call, "function": function} if _function(call) is not call else function


def _marked_tool(probe: _Probe, tool: Any) -> Any:
    """The tool with marks for its name and its description: a template may look into its parameters."""
    if not isinstance(tool, Mapping):
        return tool
    function = dict(_function(tool))
    marks = []
    for name in ("name", "description"):
        if isinstance(function.get(name), str) and function[name].strip():
            function[name] = probe.mark()
            marks.append(function[name])
    probe.add(_TOOLS, -1, marks, needs_all=True)
    return {**tool, "function": function} if _function(tool) is not tool else function


def _marked(probe: _Probe, value: Any, marks: list[str]) -> Any:
    """The value with a mark for each string in it."""
    if isinstance(value, str):
        marks.append(probe.mark())
        return marks[-1]
    if isinstance(value, Mapping):
        return {name: _marked(probe, inner, marks) for name, inner in value.items()}
    return [_marked(probe, inner, marks) for inner in value] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------------------------- reasons


def _reason(messages: Messages, missing: Sequence[_Text]) -> str:
    """The dropped texts and the fix, on one line."""
    places: dict[str, None] = {}
    for text in missing:
        places[_place(messages, text)] = None
    listed = ", ".join(list(places)[:LISTED])
    if len(places) > LISTED:
        listed += f" and {len(places) - LISTED} more"
    names = {text.name for text in missing}
    wishes = ["use a chat template that shows it (key `template`)"]
    if ignored := sorted(names - {"content", _THOUGHT, _TOOLS}):
        wishes.append(f"leave it out on purpose with ignored_properties: [{', '.join(ignored)}]")
    if _TOOLS in names:
        wishes.append("leave the tools out on purpose with tools_field: null")
    return f"the chat template drops {listed}; {', or '.join(wishes)}"


def _place(messages: Messages, text: _Text) -> str:
    if text.turn < 0:
        return "the tools"
    place = f"message {text.turn + 1} ({messages[text.turn]['role']})"
    if text.name == "content":
        return place
    return f"the thought of {place}" if text.name == _THOUGHT else f"{text.name} of {place}"
