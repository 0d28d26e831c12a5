"""Finds the texts that a chat template drops from a conversation. The model would be trained as if they did not exist.

The conversation is rendered with a mark in place of each text. A mark that is missing from the result belongs to a
text that the template drops. The answer depends on the conversation's shape only (its roles, properties and calls), so
one more rendering serves all rows of a shape. What a template does with the words of a text is seen in the rendering of
the row itself (`words`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surogate_core.data.encoded import RowError
from surogate_core.data.fields import SYSTEM_ROLES
from surogate_core.data.text.words import Piece, Rendering, leaves

if TYPE_CHECKING:
    from surogate_core.data.text.chat import Chat, Messages, Tools

KEPT_VERDICTS = 4096
"""Shapes of conversations whose answer a template keeps."""
LISTED, _LONGEST_WORD = 3, 40
"""Largest number of texts that an error names (it counts the others), and of characters of a word."""

METADATA = re.compile(r"(^|_)(id|ids|uuid|hash|index|date|time|timestamp)$|^(created|updated)|[a-z](Id|Ids|At)$")
"""Properties of a message that describe it and are not part of a prompt: ids, hashes, places, dates and times."""

_CALLS, _THOUGHT, _TOOLS = "tool_calls", "<think>", "tools"
_PLAIN = frozenset(("role", "content"))
_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""What begins and ends a thought that is written at the beginning of a content."""


def thought_in(content: Any) -> tuple[tuple[str, str], str, str] | None:
    """The tags, the thought that a content begins with, and the rest of it."""
    if isinstance(content, str):
        for opening, closing in _TAGS:
            inner, found, rest = content.lstrip().removeprefix(opening).partition(closing)
            if found and content.lstrip().startswith(opening):
                return (opening, closing), inner, rest
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateVerdict:
    """What a template does with the conversations of a shape."""

    reason: str = ""
    """The texts that it drops, as the reason of a bad row."""
    left_out: frozenset[tuple[int, str]] = frozenset()
    """The messages and properties that it may leave out of earlier turns, and does."""


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


def check_shown(chat: Chat, messages: Messages, tools: Tools, rendered: str) -> None:
    """Raise a `RowError` that names the texts that the chat template drops, as a whole or in part.

    Must be shown: each content, the name and the arguments of each tool call, the name and the description of each
    tool, and whatever text a message has besides. A thought may be left out of earlier turns, as Qwen3's template
    does, where the template shows it in the last one. `rendered`: the conversation as the template writes it.
    """
    shape = (tuple(_shape(messages, turn) for turn in range(len(messages))), _tools_shape(tools))
    verdict = chat.verdicts.get(shape)
    if verdict is None:
        if len(chat.verdicts) >= KEPT_VERDICTS:
            chat.verdicts.clear()
        verdict = chat.verdicts[shape] = _verdict(chat, messages, tools)
    if verdict.reason:
        raise RowError(verdict.reason)
    _check_words(messages, tools, rendered, verdict.left_out)


def _check_words(messages: Messages, tools: Tools, rendered: str, left_out: frozenset[tuple[int, str]]) -> None:
    found = Rendering(rendered)
    contents: list[Piece] = []
    moved: list[Piece] = []
    others: list[Piece] = []
    for turn, message in enumerate(messages):
        for name, text in _texts(messages, turn):
            if text.strip() and (turn, name) not in left_out:
                kind = others if name not in ("content", _THOUGHT) else contents
                (moved if message["role"] in SYSTEM_ROLES else kind).append((turn, name, text))
    for tool in tools or ():
        if isinstance(tool, Mapping):
            values = (_function(tool).get(name) for name in ("name", "description"))
            others += [(-1, _TOOLS, value) for value in values if isinstance(value, str)]
    lacking = [*found.lacking(contents, moved), *(piece for piece in others if not found.has(piece[2]))]
    if lacking:
        raise RowError(_words_reason(messages, found, lacking))


def _texts(messages: Messages, turn: int) -> Iterator[tuple[str, str]]:
    """The texts of a message that a template must show in full, each with its property."""
    for name, value in messages[turn].items():
        if name == "content" and isinstance(value, str):
            thought = thought_in(value) if messages[turn]["role"] == "assistant" else None
            if thought is not None:
                yield _THOUGHT, thought[1]
            yield name, value if thought is None else thought[2]
        elif name == _CALLS and isinstance(value, list):
            for call in value:
                if isinstance(call, Mapping):
                    parts = (_function(call).get(part) for part in ("name", "arguments"))
                    yield from ((name, leaf) for part in parts for leaf in leaves(part))
        elif name not in _PLAIN and isinstance(value, str) and not _is_metadata(messages, turn, name):
            yield name, value


# ---------------------------------------------------------------------------------- shapes


def _shape(messages: Messages, turn: int) -> Hashable:
    """Everything except the template that decides whether a message's texts are shown."""
    message = messages[turn]
    role, content = message["role"], message.get("content")
    thought = thought_in(content) if role == "assistant" else None
    tags, says = thought[0] if thought is not None else None, _has_text(content)
    if message.keys() <= _PLAIN:
        return (role, tags, says) if tags or not says else role
    others = tuple(
        (name, _calls_shape(value) if name == _CALLS else _has_text(value))
        for name, value in sorted(message.items())
        if name not in _PLAIN and not _is_metadata(messages, turn, name)
    )
    return role, tags, says, others


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


def _verdict(chat: Chat, messages: Messages, tools: Tools) -> TemplateVerdict:
    probe = _probe(messages, tools)
    try:
        rendered = chat.render(probe.messages, probe.tools)
        missing = [text for text in probe.texts if not text.is_in(rendered)]
    except RowError:  # the template looks into one of the texts
        missing = [text for text in probe.texts if not _is_shown_alone(chat, messages, tools, probe, text)]
    kept = {text.name for text in _first_of_each_name(missing) if _is_shown_last(chat, probe, text)}
    left_out = frozenset((text.turn, text.name) for text in missing if text.turn >= 0 and text.name in kept)
    missing = [text for text in missing if (text.turn, text.name) not in left_out]
    return TemplateVerdict(reason=_reason(messages, missing) if missing else "", left_out=left_out)


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
    found = thought_in(content) if message["role"] == "assistant" else None
    if found is None:
        return mark
    thought, (opening, closing) = probe.mark(), found[0]
    probe.add(_THOUGHT, turn, [thought])
    return f"{opening}\n{thought}\n{closing}\n\n{mark}"


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
        places[_place(messages, text.turn, text.name)] = None
    listed = ", ".join(list(places)[:LISTED])
    if len(places) > LISTED:
        listed += f" and {len(places) - LISTED} more"
    wishes = _wishes({text.name for text in missing}, "use a chat template that shows it (key `template`)")
    return f"the chat template drops {listed}; {wishes}"


def _words_reason(messages: Messages, found: Rendering, lacking: Sequence[Piece]) -> str:
    """The texts of which words are missing, and the fix."""
    places: dict[str, str] = {}
    for turn, name, text in lacking:
        places.setdefault(_place(messages, turn, name), found.first_lacking(text)[:_LONGEST_WORD])
    listed = ", ".join(
        place + (f" (such as {word!r})" if word else "") for place, word in list(places.items())[:LISTED]
    )
    if len(places) > LISTED:
        listed += f" and {len(places) - LISTED} more"
    wish = "use a chat template that shows them (key `template`), change the text"
    return (
        f"the chat template looks into the text and drops words of {listed}; "
        f"{_wishes({name for _, name, _ in lacking}, wish)}"
    )


def _wishes(names: set[str], *first: str) -> str:
    wishes = list(first)
    if ignored := sorted(names - {"content", _THOUGHT, _TOOLS}):
        wishes.append(f"leave it out on purpose with ignored_properties: [{', '.join(ignored)}]")
    if _TOOLS in names:
        wishes.append("leave the tools out on purpose with tools_field: null")
    return ", or ".join(wishes)


def _place(messages: Messages, turn: int, name: str) -> str:
    if turn < 0:
        return "the tools"
    place = f"message {turn + 1} ({messages[turn]['role']})"
    if name == "content":
        return place
    return f"the thought of {place}" if name == _THOUGHT else f"{name} of {place}"
