"""Type `conversation`: messages through the tokenizer's chat template; assistant turns are trained."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surogate_core.bundles import DatasetFormat
from surogate_core.data.fields import require_unicode, required
from surogate_core.data.tokenize import RowError

if TYPE_CHECKING:
    from surogate_core.data.tokenize import EncodeContext, Encoded

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationOptions:
    """Fields of a data set of type `conversation`."""

    messages_field: str = "messages"
    """Field of the row that holds the list of messages."""
    system_field: str | None = None
    """Field that holds a system prompt, put before the messages; null takes none."""
    tools_field: str | None = None
    """Field that holds the tools the assistant may call: a list, or a list as JSON text; null takes none."""
    message_property_mappings: dict[str, str] = field(default_factory=dict)
    """Property the template reads → its name in the data, e.g. `{role: from, content: value}`."""
    role_mappings: dict[str, str] = field(default_factory=dict)
    """Role in the data → the role that it is, e.g. `{human: user, gpt: assistant}`."""


def encode(row: Mapping[str, Any], options: ConversationOptions, context: EncodeContext) -> Encoded:
    """The rendered conversation; the assistant's turns with their end-of-turn tokens are trained.

    Raises `RowError` when the messages are malformed, none is the assistant's, or the chat
    template does not take them.
    """
    from surogate_core.data.labels import tokenize_conversation
    from surogate_core.data.tokenize import Encoded

    messages = read_messages(row, options)
    ids, trained = tokenize_conversation(context.tokenizer, messages, read_tools(row, options))
    return Encoded.from_mask(ids, trained)


def read_messages(row: Mapping[str, Any], options: ConversationOptions) -> list[dict[str, Any]]:
    """The row's checked messages under the names that chat templates read."""
    raw = required(row, options.messages_field)
    if not isinstance(raw, list):
        raise RowError(f"field {options.messages_field!r} must be a list of messages, this is {type(raw).__name__}")
    messages = [_message(number, message, options) for number, message in enumerate(raw, start=1)]
    if options.system_field is not None and row.get(options.system_field):
        system = row[options.system_field]
        if not isinstance(system, str):
            raise RowError(f"field {options.system_field!r} must be a string, this is {type(system).__name__}")
        if messages and messages[0]["role"] == "system":
            raise RowError(f"a system prompt is in both field {options.system_field!r} and the messages")
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("no assistant turn")
    return messages


def _message(number: int, raw: Any, options: ConversationOptions) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise RowError(f"message {number} must be an object, this is {type(raw).__name__}")
    renamed = {source: name for name, source in options.message_property_mappings.items()}
    # Columns that some rows lack come out of Parquet and Arrow as nulls.
    message: dict[str, Any] = {str(renamed.get(name, name)): value for name, value in raw.items() if value is not None}
    role = message.get("role")
    if isinstance(role, str) and role in options.role_mappings:
        role = message["role"] = options.role_mappings[role]
    if role not in ROLES:
        raise RowError(_wrong_role(number, role, raw, options))
    content = message.get("content")
    if content is None or content == "":
        if role == "assistant" and message.get("tool_calls"):
            return {**message, "content": ""}
        raise RowError(f"message {number} ({role}) has no content")
    if not isinstance(content, str):
        raise RowError(f"message {number} ({role}): content must be a string, this is {type(content).__name__}")
    if not content.strip():
        raise RowError(f"message {number} ({role}): content is blank")
    require_unicode(content, f"message {number} ({role}): content")
    return message


def _wrong_role(number: int, role: Any, raw: Mapping[str, Any], options: ConversationOptions) -> str:
    if role is None:
        name = options.message_property_mappings.get("role", "role")
        return (
            f"message {number} has no property {name!r}, it has {', '.join(map(repr, raw)) or 'none'}; "
            f"map others with message_property_mappings"
        )
    close = difflib.get_close_matches(str(role).lower(), ROLES, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"message {number} has role {role!r}, known are {', '.join(ROLES)}{hint or '; map it with role_mappings'}"


def read_tools(row: Mapping[str, Any], options: ConversationOptions) -> list[Any] | None:
    """The row's tools, or None."""
    if options.tools_field is None or not row.get(options.tools_field):
        return None
    tools = row[options.tools_field]
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise RowError(f"field {options.tools_field!r} is not JSON: {error.msg}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"field {options.tools_field!r} must be a list of objects")
    return tools


FORMAT = DatasetFormat(name="conversation", options=ConversationOptions, encode=encode, version=1)
