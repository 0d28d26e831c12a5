"""Pieces of the rules of constrained calls, in the dialect of Lark that llguidance reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of JSON as chat templates write it."""


def quoted(text: str) -> str:
    """A rule's part that is this text."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(function: Mapping[str, Any]) -> str:
    """A rule's part that is the arguments of a function."""
    schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {"type": "object", **schema, "x-guidance": AS_WRITTEN}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def alternatives(name: str, parts: Sequence[str]) -> str:
    """Rules for one of these parts."""
    names = [f"{name}{number}" for number in range(len(parts))]
    rules = [f"{one}: {part}\n" for one, part in zip(names, parts, strict=True)]
    return f"{name}: {' | '.join(names)}\n{''.join(rules)}"
