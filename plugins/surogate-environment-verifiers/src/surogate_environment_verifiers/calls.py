"""Tool calls in a reply, as chat templates of the Hermes kind write them."""

from __future__ import annotations

import json
import re
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINKING = "</think>"


def calls_of(text: str) -> tuple[str, list[tuple[str, str]]]:
    """(the text without calls, (name, arguments as JSON) of each ``<tool_call>`` after the thinking).

    A call that is not JSON stays in the text.
    """
    thinking, end, rest = text.rpartition(_THINKING)
    found: list[tuple[str, str]] = []

    def take(match: re.Match[str]) -> str:
        call = _parsed(match[1])
        if call is None:
            return match[0]
        found.append(call)
        return ""

    shown = _CALL.sub(take, rest)
    return (f"{thinking}{end}{shown}".strip() if found else text), found


def _parsed(text: str) -> tuple[str, str] | None:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    return value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)
