"""Tools of a request or a row, and the parser for a model's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from surogate_core.bundles import ToolParserSpec
from surogate_core.errors import UserError

Tools = Sequence[Mapping[str, Any]]


def core_parsers() -> dict[str, ToolParserSpec]:
    """The forms that the core reads, by name."""
    from surogate_core.tools import json_calls, xml_calls

    return {spec.name: spec for spec in (*json_calls.SPECS, xml_calls.SPEC)}


def functions_of(tools: Tools) -> list[Mapping[str, Any]]:
    """The functions of tools, which have them below ``function`` or are functions themselves."""
    found = [tool["function"] if isinstance(tool.get("function"), Mapping) else tool for tool in tools]
    return [function for function in found if isinstance(function.get("name"), str)]


def check_parser(parsers: Mapping[str, ToolParserSpec], name: str, *, key: str) -> None:
    """Raise `UserError` if there is no parser of that name."""
    if name not in parsers:
        near = get_close_matches(name, parsers, n=1)
        raise UserError(
            f"{key} {name}: there is no such parser. Fix: {near[0] if near else ', '.join(sorted(parsers))}"
        )


def parser_of(
    parsers: Mapping[str, ToolParserSpec], template: str, *, name: str = "", key: str = "--tool-parser"
) -> ToolParserSpec | None:
    """The parser of that name, otherwise the one for a chat template's text; None without one.

    Raises `UserError` if there is no parser of that name, or if several fit equally well.
    """
    if name:
        check_parser(parsers, name, key=key)
        return parsers[name]
    fitting = [spec for spec in parsers.values() if spec.fits(template)]
    best = [spec for spec in fitting if spec.priority == max(one.priority for one in fitting)]
    if len(best) > 1:
        names = " and ".join(spec.name for spec in best)
        raise UserError(f"the chat template fits the tool parsers {names}. Fix: {key} {best[0].name}")
    return best[0] if best else None
