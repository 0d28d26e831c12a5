"""Prompts as JSON lines: ``{"prompt": TEXT}``, ``{"messages": [{"role": …, "content": …}, …]}``, or a text alone.

A row with messages may have ``tools``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from surogate_core.errors import UserError
from surogate_core.tools.checks import ToolError, check_tools

KEYS = ("prompt", "messages", "tools")
"""What a row may have."""


def fault_of(row: Any) -> tuple[str, str] | None:
    """(what is wrong with a row that is no text, the fix); None if nothing is."""
    if not isinstance(row, Mapping) or not (
        isinstance(row.get("prompt"), str) or isinstance(row.get("messages"), list)
    ):
        return 'has neither a text "prompt" nor a list "messages".', '{"prompt": "…"}'
    if "prompt" in row and "messages" in row:
        return 'has both "prompt" and "messages".', "keep one"
    if unknown := [key for key in row if key not in KEYS]:
        near = get_close_matches(str(unknown[0]), KEYS, n=1)
        fix = near[0] if near else f"leave it out; a row has {', '.join(KEYS)}"
        return f"has {str(unknown[0])[:100]!r}, which is no key of a prompt.", fix
    if row.get("tools") is not None:
        if "messages" not in row:
            return "has tools without messages.", '"messages" in place of "prompt"'
        try:
            tools_of(row)
        except ToolError as error:
            return f"{str(error).rstrip('.')}.", '{"type": "function", "function": {"name": …}}'
    return None


def tools_of(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tools of a row, which may be written as text of JSON; raises `ToolError`."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ToolError("tools", "is text that is not JSON") from error
    return [] if tools is None else check_tools(tools, strict=False)


def parsed_line(line: str, name: str) -> Any:
    """The value of a line of JSON; raises `UserError` if it is none, or has text that no tokenizer takes."""
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name}: has half of a surrogate pair, which is not text. Fix: remove it.") from error
    except RecursionError as error:
        raise UserError(f"{name}: is nested too deeply. Fix: one object a line.") from error
    except ValueError as error:
        raise UserError(f"{name}: not valid JSON: {error}. Fix: one object a line.") from error
    return value


def json_rows(text: str, name: str) -> list[tuple[str, Any]]:
    """(name and line, value) of each line that is not blank; raises what `parsed_line` raises."""
    lines = ((f"{name}:{place}", line) for place, line in enumerate(text.split("\n"), start=1) if line.strip())
    return [(where, parsed_line(line, where)) for where, line in lines]


def prompt_rows(text: str, name: str) -> list[tuple[str, str | dict[str, Any]]]:
    """(name and line, row) of each line of a file. Raises `UserError` for a line that is no prompt."""
    return _prompts(json_rows(text, name))


def read_rows(file: str | Path, *, key: str) -> list[tuple[str, Any]]:
    """(name and line, value) of each line of a file of JSON lines. `key`: the flag or the key that names it."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise UserError(f"{key} {file}: cannot be read: {reason}. Fix: name a file of JSON lines.") from error
    return json_rows(text, str(file))


def read_prompts(file: str | Path, *, key: str) -> list[tuple[str, str | dict[str, Any]]]:
    """The rows of a file, at least one. `key`: the flag or the key that names it, for messages."""
    return some_prompts(_prompts(read_rows(file, key=key)), f"{key} {file}")


def some_prompts(rows: list[tuple[str, str | dict[str, Any]]], name: str) -> list[tuple[str, str | dict[str, Any]]]:
    """The rows; raises `UserError` if there are none."""
    if not rows:
        raise UserError(f'{name}: has no prompt. Fix: one object a line, such as {{"prompt": "…"}}')
    return rows


def _prompts(rows: list[tuple[str, Any]]) -> list[tuple[str, str | dict[str, Any]]]:
    for where, row in rows:
        if not isinstance(row, str) and (fault := fault_of(row)) is not None:
            raise UserError(f"{where}: {fault[0]} Fix: {fault[1]}")
    return rows
