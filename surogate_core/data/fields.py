"""Reading a row's fields, with reasons that name the nearest field."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surogate_core.data.encoded import RowError
from surogate_core.files.foreign import unique

INSTRUCTIONS = tuple("instruction prompt question query".split())  # noqa: SIM905
INPUTS = ("input", "context")
OUTPUTS = ("output", "response", "completion", "answer")
"""Usual names of the fields of an instruction, its input and its output; the first that fits is taken."""

MESSAGES = tuple("messages conversations conversation chat dialog turns".split())  # noqa: SIM905
"""Usual names of the field of messages."""
SYSTEM_ROLES = ("system", "developer")
"""Roles of a message that is a system prompt."""
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
"""Roles that a message may have."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value of a column that Python cannot hold, such as a date after the year 9999."""

    reason: str


def required(row: Mapping[str, Any], field: str) -> Any:
    """The field's value. Raises `RowError` when the row lacks it."""
    if isinstance(value := row.get(field), Unreadable):
        raise RowError(f"field {field!r} cannot be read: {value.reason}")
    if value is None:
        close = difflib.get_close_matches(field, [name for name in row if row[name] is not None], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        if not hint and any(name in MESSAGES and isinstance(row[name], list) for name in row):
            # ShareGPT has other names for messages and roles too.
            hint = "; type: auto reads such rows"
        state = "is null" if field in row else f"is missing, the row has {', '.join(map(repr, row)) or 'no fields'}"
        raise RowError(f"field {field!r} {state}{hint}")
    return value


def required_text(row: Mapping[str, Any], field: str) -> str:
    """The field's text. Raises `RowError` when it is missing, not a string or blank."""
    value = required(row, field)
    if not isinstance(value, str):
        raise RowError(f"field {field!r} must be a string, this is {type(value).__name__}")
    if not value.strip():
        raise RowError(f"field {field!r} is empty")
    require_unicode(value, f"field {field!r}")
    return value


def first_with_text(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of the names under which the row has text that is not blank."""
    return next((name for name in names if isinstance(value := row.get(name), str) and value.strip()), None)


def optional_text(row: Mapping[str, Any], field: str | None) -> str:
    """The field's text, or nothing where it is absent, null or empty; a field of None is nothing too.

    Raises `RowError` when the value is not a string, and when the row has a field of nearly the same name instead.
    """
    if field is None or row.get(field) is None:
        close = difflib.get_close_matches(field, list(row), n=1, cutoff=0.75) if field and field not in row else []
        if close:
            raise RowError(f"field {field!r} is missing; did you mean {close[0]!r}?")
        return ""
    value = row[field]
    if not isinstance(value, str):
        raise RowError(f"field {field!r} must be a string, this is {type(value).__name__}")
    require_unicode(value, f"field {field!r}")
    return value if value.strip() else ""


def require_unicode(text: str, what: str) -> None:
    """Raise `RowError` for half a surrogate pair: JSON can write it, no tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{what} is not Unicode text: half a surrogate pair at character {error.start + 1}") from error


def from_json(text: str, what: str) -> Any:
    """The value that a text of JSON writes. Raises `RowError`, its reason beginning with `what`."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise RowError(f"{what} is not JSON: {error.msg} at character {error.pos + 1}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply; a number of more digits than Python reads
        raise RowError(f"{what} is not JSON that can be read: {error}") from error


def listed(value: Any) -> Any:
    """A struct of lists of one length, which columnar files have for a list of structs, as that list; another value as
    it is.
    """
    if not isinstance(value, Mapping) or not value or not all(isinstance(inner, list) for inner in value.values()):
        return value
    if len({len(inner) for inner in value.values()}) != 1:
        return value
    return [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]
