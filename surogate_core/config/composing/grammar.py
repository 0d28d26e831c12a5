"""Hydra's override grammar: writing a value in it, and reading one command-line argument."""

from __future__ import annotations

import math
import re
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from surogate_core.config.yamlfile import MAX_DEPTH, MAX_DIGITS

KEY = re.compile(r"[A-Za-z_$][\w$-]*(\.([A-Za-z_$][\w$-]*|\d+))*", re.ASCII)
"""Dotted keys that an override may name."""

_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_DICT_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_KEYWORDS = {"true", "false", "null", "inf", "nan"}
_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class LimitError(ValueError):
    """An override is well formed, and larger than any that a run can mean."""


class NotWritableError(ValueError):
    """A value that the override grammar has no form for."""


def encode(value: Any) -> str:
    """The value as the right-hand side of an override; Hydra reads exactly the value back.

    Text with ``${…}`` stays an interpolation. Raises `NotWritableError` for dict keys that the
    grammar cannot write and for values that are not plain data.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        return repr(value) if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, str):
        if _NEEDS_NO_QUOTES.fullmatch(value) and value.lower() not in _KEYWORDS:
            return value
        return QuotedString(text=value, quote=Quote.single).with_quotes()
    if isinstance(value, list | tuple):
        return f"[{','.join(encode(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_dict_key(k)}:{encode(v)}" for k, v in value.items()) + "}"
    raise NotWritableError(f"{type(value).__name__} is not a plain value")


def _dict_key(key: Any) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    if isinstance(key, str) and _DICT_KEY.fullmatch(key) and key.lower() not in _KEYWORDS:
        return key
    if isinstance(key, str) and re.fullmatch(r"0|[1-9]\d*", key):
        return key
    raise NotWritableError(f"the key {key!r} has characters that a config key may not have")


def _depth(text: str) -> int:
    """How many brackets are open at once, at most."""
    depth = deepest = 0
    for character in text:
        depth += (character in "[{(") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest


def parse_override(text: str) -> Override:
    """One command-line argument; raises `ValueError` with a one-line reason.

    A value that the grammar cannot read bare and that has no brackets, commas or quotes
    (``model=~/x``, ``run_name=naïve``) is taken as text.
    """
    bare = _QUOTED.sub("", text)
    if _depth(bare) > MAX_DEPTH:
        raise LimitError(f"lists and mappings are nested too deeply; at most {MAX_DEPTH} levels")
    if re.search(rf"[0-9_]{{{MAX_DIGITS},}}", bare) is not None:
        raise LimitError(f"a number has fewer than {MAX_DIGITS} digits")
    parser = OverridesParser.create()
    try:
        return parser.parse_override(text)
    except HydraException as error:
        key, equals, value = text.partition("=")
        if equals and value and not re.search(r"[\[\]{}(),'\"]", value):
            try:
                return parser.parse_override(f"{key}={QuotedString(text=value, quote=Quote.single).with_quotes()}")
            except HydraException:
                pass
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(reason) from None
