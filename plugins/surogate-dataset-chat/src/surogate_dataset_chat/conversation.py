"""Type `conversation`: messages through the tokenizer's chat template; assistant turns are trained."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import RowError, UserError, bundles, encoding, fields

if TYPE_CHECKING:
    from surogate_core.plugin import EncodeContext, Encoded

SYSTEM, TOOLS = "system", "tools"
"""Fields of a row that are read where the data set's entry does not say otherwise."""
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
"""Fields that hold what is no text: the messages that refer to it cannot be trained without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationOptions:
    """Fields of a data set of type `conversation`."""

    messages_field: str = "messages"
    """Field of the row that holds the list of messages."""
    system_field: str | None = SYSTEM
    """Field that holds a system prompt, put before the messages; rows may lack it, and null leaves it out."""
    tools_field: str | None = TOOLS
    """Field that holds the tools that the assistant may call: a list, or a list as JSON text; rows may lack it, and
    null leaves it out."""
    message_property_mappings: dict[str, str] = field(default_factory=dict)
    """Property the template reads → its name in the data, e.g. `{role: from, content: value}`."""
    role_mappings: dict[str, str] = field(default_factory=dict)
    """Role in the data → the role that it is, e.g. `{human: user, gpt: assistant}`."""
    ignored_properties: list[str] = field(default_factory=list)
    """Properties of messages that are left out on purpose, by their names in the data, e.g. `[reasoning_content]`."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for mappings that contradict each other."""
        sources = list(self.message_property_mappings.values())
        for name in sources:
            if sources.count(name) > 1:
                raise ValueError(f"message_property_mappings takes two properties from {name!r}")
            if name in self.ignored_properties:
                raise ValueError(f"message_property_mappings takes {name!r}, which ignored_properties leaves out")


def columns(options: ConversationOptions) -> set[str]:
    """The fields of a row that are read, or left out by the user's word."""
    return {options.messages_field, options.system_field or SYSTEM, options.tools_field or TOOLS}


def encode(row: Mapping[str, Any], options: ConversationOptions, context: EncodeContext) -> Encoded:
    """The rendered conversation; the assistant's turns with their end-of-turn tokens are trained.

    Raises `RowError` when the messages are malformed, none is the assistant's, or the chat
    template does not take or does not show them, `UserError` when there is to be no template.
    """

    if not context.use_chat_template:
        raise UserError(
            "use_chat_template is false, but conversations have turns that only a chat template can distinguish. "
            "Fix: use_chat_template: true (for example with `template: chatml`, for a tokenizer without one); "
            "or type instruction or text for data that is not conversations."
        )
    messages = read_messages(row, options)
    tools = read_tools(row, options)
    encoding.with_default_system(messages, context, tools)
    overrides = []
    for number, message in enumerate(messages, start=1):
        try:
            overrides.append(encoding.Override.taken_from(message))
        except RowError as error:
            raise RowError(f"message {number} ({message['role']}): {error}") from error
    return encoding.tokenize_conversation(
        context.tokenizer, messages, tools, loss_scale=context.loss_scale, overrides=overrides
    )


def read_messages(row: Mapping[str, Any], options: ConversationOptions) -> list[dict[str, Any]]:
    """The row's checked messages under the names that chat templates read."""
    name = options.messages_field
    raw = fields.required(row, name)
    for medium in MEDIA:
        if row.get(medium):
            raise RowError(f"field {medium!r} has something other than text; only text can be trained")
    if isinstance(raw, str):  # CSV, and Parquet whose writer could not nest, hold them as JSON text
        raw = fields.from_json(raw, f"field {name!r} must be a list of messages, this is text that")
    raw = fields.listed(raw)
    if not isinstance(raw, list):
        raise RowError(f"field {name!r} must be a list of messages, this is {type(raw).__name__}")
    messages = [_message(number, message, options) for number, message in enumerate(raw, start=1)]
    if system := _system(row, options):
        if not messages or messages[0]["role"] not in fields.SYSTEM_ROLES:
            messages.insert(0, {"role": "system", "content": system})
        elif not messages[0]["content"].strip():
            messages[0]["content"] = system
        elif messages[0]["content"].strip() != system.strip():
            raise RowError(
                f"field {options.system_field!r} and the messages have different system prompts; "
                f"system_field: null uses that of the messages"
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("no assistant turn")
    return messages


def _system(row: Mapping[str, Any], options: ConversationOptions) -> str:
    if options.system_field == SYSTEM and SYSTEM not in row:
        return ""  # the field is a default, so a similar name in the row is not a misspelling of it
    return fields.optional_text(row, options.system_field)


def _renamed(number: int, raw: Mapping[str, Any], options: ConversationOptions) -> dict[str, Any]:
    """The message under the names that templates read, without what is left out on purpose."""
    renamed = {source: name for name, source in options.message_property_mappings.items()}
    message: dict[str, Any] = {}
    for source, value in raw.items():
        # Parquet and Arrow give null for columns that some rows lack.
        if value is None or source in options.ignored_properties:
            continue
        name = str(renamed.get(source, source))
        if name in message:
            both = f"{options.message_property_mappings[name]!r} and {name!r}"
            raise RowError(
                f"message {number} has both {both}, which message_property_mappings makes one; "
                f"name the other in ignored_properties"
            )
        message[name] = value
    return message


def _message(number: int, raw: Any, options: ConversationOptions) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise RowError(f"message {number} must be an object, this is {type(raw).__name__}")
    message = _renamed(number, raw, options)
    role = message.get("role")
    if isinstance(role, str) and role in options.role_mappings:
        role = message["role"] = options.role_mappings[role]
    if role not in fields.ROLES:
        raise RowError(_wrong_role(number, role, raw, options))
    place = f"message {number} ({role})"
    if "tool_calls" in message:
        calls = _tool_calls(message.pop("tool_calls"), place)
        if calls:
            message["tool_calls"] = calls
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(content, place)
    message["content"] = content = "" if content is None else content
    if not isinstance(content, str):
        raise RowError(f"{place}: content must be a string, this is {type(content).__name__}")
    # A tool may return nothing, a system prompt may be left empty, and a call needs no words.
    if not content.strip() and (role == "user" or (role == "assistant" and "tool_calls" not in message)):
        raise RowError(f"{place}: content is blank" if content else f"{place} has no content")
    fields.require_unicode(content, f"{place}: content")
    return message


def _joined(parts: list[Any], place: str) -> str:
    """OpenAI's content parts as one text."""
    texts = []
    for number, part in enumerate(parts, start=1):
        if not isinstance(part, Mapping):
            raise RowError(f"{place}: content part {number} must be an object, this is {type(part).__name__}")
        if part.get("type", "text") != "text":
            raise RowError(f"{place}: content part {number} is of type {part['type']!r}; only text can be trained")
        if not isinstance(part.get("text"), str):
            raise RowError(f"{place}: content part {number} has no text")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(raw: Any, place: str) -> list[Any]:
    """The calls as templates read them."""
    if isinstance(raw, str):
        raw = fields.from_json(raw, f"{place}: tool_calls must be a list of objects, this is text that")
    raw = fields.listed(raw)
    if not isinstance(raw, list) or not all(isinstance(call, Mapping) for call in raw):
        raise RowError(f"{place}: tool_calls must be a list of objects")
    try:
        return [encoding.template_call(call, f"tool call {number}") for number, call in enumerate(raw, start=1)]
    except encoding.CallError as error:
        raise RowError(f"{place}: {error}") from error


def _wrong_role(number: int, role: Any, raw: Mapping[str, Any], options: ConversationOptions) -> str:
    if role is None:
        name = options.message_property_mappings.get("role", "role")
        return (
            f"message {number} has no property {name!r}, it has {', '.join(map(repr, raw)) or 'none'}; "
            f"map others with message_property_mappings"
        )
    close = difflib.get_close_matches(str(role).lower(), fields.ROLES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    known = ", ".join(fields.ROLES)
    return f"message {number} has role {role!r}, known are {known}{hint or '; map it with role_mappings'}"


def read_tools(row: Mapping[str, Any], options: ConversationOptions) -> list[Any] | None:
    """The row's tools, or None."""
    if options.tools_field is None or not row.get(options.tools_field):
        return None
    tools = row[options.tools_field]
    if isinstance(tools, str):
        tools = fields.from_json(tools, f"field {options.tools_field!r}")
        if tools is None:
            return None
    tools = fields.listed(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"field {options.tools_field!r} must be a list of objects; tools_field: null leaves it out")
    return tools or None


_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
]

FORMAT = bundles.DatasetFormat(
    name="conversation",
    options=ConversationOptions,
    encode=encode,
    columns=columns,
    version=4,
    examples=(({"messages": _TURNS}, {}), ({"messages": [*_TURNS, *_TURNS[1:]]}, {})),
)
