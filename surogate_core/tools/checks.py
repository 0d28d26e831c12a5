"""Tools as JSON: what is offered to a model, checked key by key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from surogate_core.errors import UserError

MOST_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_KEYS = ("name", "description", "parameters", "strict")


class ToolError(UserError):
    """A tool that is none, and the path of what is wrong."""

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason.rstrip('.')}.")
        self.where = where


def check_tools(value: Any, where: str = "tools", *, strict: bool = True) -> list[Mapping[str, Any]]:
    """The tools; raises `ToolError` with the path of what is wrong.

    `strict`: as the OpenAI API has them. Otherwise they may be functions alone, with keys of their own, as data sets
    have them.
    """
    if not isinstance(value, list) or (strict and len(value) > MOST_TOOLS):
        raise ToolError(where, f"must be a list of at most {MOST_TOOLS} tools" if strict else "must be a list of tools")
    seen: set[str] = set()
    for place, tool in enumerate(value):
        path = f"{where}[{place}]"
        form = '{"type": "function", "function": {"name": …, "parameters": …}}'
        if not isinstance(tool, Mapping):
            raise ToolError(path, f"must be an object, {form}")
        bare = not strict and "function" not in tool
        if not bare and tool.get("type", None if strict else "function") != "function":
            raise ToolError(f"{path}.type", "must be function, the only kind of tool here")
        function = tool if bare else tool.get("function")
        inner = path if bare else f"{path}.function"
        if not isinstance(function, Mapping):
            raise ToolError(inner, 'must be an object, {"name": …, "parameters": …}')
        _check_function(function, inner, strict=strict)
        if function["name"] in seen:
            raise ToolError(f"{inner}.name", f"another tool is called {function['name']} too")
        seen.add(function["name"])
    return value


def _check_function(function: Mapping[str, Any], where: str, *, strict: bool) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolError(f"{where}.name", "must be 1 to 64 letters, digits, dashes, dots and underscores")
    if not isinstance(function.get("description") or "", str):
        raise ToolError(f"{where}.description", "must be text")
    if not isinstance(function.get("strict") or False, bool):
        raise ToolError(f"{where}.strict", "must be true or false")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ToolError(f"{where}.parameters", "must be a JSON schema, an object")
    if parameters and parameters.get("type", "object") != "object":
        raise ToolError(f"{where}.parameters.type", "must be object, since arguments have names")
    if strict and (wrong := [key for key in function if key not in _KEYS]):
        near = get_close_matches(wrong[0], _KEYS, n=1)
        fix = near[0] if near else ", ".join(_KEYS)
        raise ToolError(f"{where}.{wrong[0][:100]}", f"there is no such field. Fix: {fix}")


def read_tools(file: str | Path, *, key: str) -> list[Mapping[str, Any]]:
    """The tools of a JSON file; raises `UserError`. `key`: the flag that names it."""
    try:
        value = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()
    except OSError as error:
        raise UserError(f"{key} {file}: cannot be read: {error.strerror}. Fix: name a JSON list of tools.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{key} {file}: is not UTF-8. Fix: name a JSON list of tools.") from error
    except UnicodeEncodeError as error:
        raise UserError(f"{key} {file}: has half of a surrogate pair, which is not text. Fix: remove it.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{key} {file}: is not JSON: {error}. Fix: name a JSON list of tools.") from error
    if not value:
        raise UserError(f"{key} {file}: has no tool. Fix: name a JSON list of tools.")
    return check_tools(value, f"{key} {file}: tools", strict=False)
