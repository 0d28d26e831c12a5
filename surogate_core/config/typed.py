"""Building dataclass instances from plain values, collecting every mistake in plain words.

Types are checked strictly (no text for numbers, no numbers for switches); whole numbers are
accepted where a fraction is wanted, and where text is wanted.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ConfigDict, TypeAdapter, ValidationError

from surogate_core.bundles.options import field_types
from surogate_core.errors import Problem

UnknownKey = Callable[[str, Iterable[str]], Problem]
"""(full key, known names) → the problem of a key that does not exist."""

_UNION = (Union, types.UnionType)
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null", Any: "any"}


class Builder:
    """Builds instances; `problems` holds what was wrong."""

    def __init__(self, where: Callable[[str], str], unknown_key: UnknownKey) -> None:
        self.where = where
        self.unknown_key = unknown_key
        self.problems: list[Problem] = []

    def dataclass(self, cls: type, values: Mapping[str, Any], prefix: str) -> Any:
        """An instance of a dataclass, or None when there was a mistake. `prefix` ends in a dot or is empty."""
        before = len(self.problems)
        hints = field_types(cls)
        for name in values:
            if name not in hints:
                self.problems.append(self.unknown_key(f"{prefix}{name}", hints))
        built = {n: self.value(hints[n], v, f"{prefix}{n}") for n, v in values.items() if n in hints}
        for field in dataclasses.fields(cls):
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if field.init and required and field.name not in values:
                message = f"must be set: {type_text(hints[field.name])}."
                self._problem(f"{prefix}{field.name}", message)
        if len(self.problems) > before:
            return None
        try:
            return cls(**built)
        except (ValueError, TypeError) as error:
            self._problem(prefix.rstrip(".") or cls.__name__, f"{error}")
            return None

    def value(self, hint: Any, value: Any, key: str) -> Any:
        """A value of the annotated type, or None when there was a mistake."""
        if value == "???":
            self._problem(key, f"must be set: {type_text(hint)}.")
            return None
        inner = _holds_dataclass(hint)
        if inner is not None:
            return self._nested(hint, inner, value, key)
        if isinstance(value, str) and value and _is_list_of_text(hint):
            value = split_names(value)
        if isinstance(value, int) and not isinstance(value, bool) and _takes(hint, str) and not _takes_number(hint):
            value = str(value)
        if (reason := _unusable(value)) is not None:
            self._problem(key, reason)
            return None
        try:
            text = json.dumps(value)
            return adapter(hint).validate_json(text)
        except (TypeError, ValueError) as error:
            if isinstance(error, ValidationError):
                self._translate(error, hint, value, key)
            else:
                self._problem(key, f"must be {type_text(hint)}; got {_shown(value)}.")
            return None

    def _nested(self, hint: Any, inner: type, value: Any, key: str) -> Any:
        bare = _strip(hint)
        if value is None and _takes(bare, type(None)):
            return None
        origin = get_origin(bare)
        if origin in _UNION:
            bare = next(a for a in get_args(bare) if _holds_dataclass(a) is not None)
            origin = get_origin(_strip(bare))
        if origin in (list, tuple) and isinstance(value, list):
            built = [self._nested(get_args(bare)[0], inner, v, f"{key}.{i}") for i, v in enumerate(value)]
            return origin(built)
        if origin in (dict, Mapping) and isinstance(value, Mapping):
            return {k: self._nested(get_args(bare)[1], inner, v, f"{key}.{k}") for k, v in value.items()}
        if bare is inner and isinstance(value, Mapping):
            return self.dataclass(inner, value, f"{key}.")
        self._problem(key, f"must be {type_text(hint)}; got {_shown(value)}.")
        return None

    def _translate(self, error: ValidationError, hint: Any, value: Any, key: str) -> None:
        own = [e["msg"] for e in error.errors() if e["type"] in ("value_error", "assertion_error")]
        if value == "" and any(get_origin(a) is Annotated and get_args(a)[0] is str for a in _alternatives(hint)):
            null = " or null" if _takes(hint, type(None)) else ""
            self._problem(key, "is empty, as an unset shell variable is.", f"{key}=VALUE{null}")
            return
        message = f"{own[0].rstrip('.')}." if own else f"must be {type_text(hint)}; got {_shown(value)}."
        self._problem(key, message, _fix(hint, value))

    def _problem(self, key: str, message: str, fix: str = "") -> None:
        self.problems.append(Problem(key=key, message=message, where=self.where(key), fix=fix))


def split_names(text: str) -> list[str]:
    """The names in ``a`` or ``a, b``, as people write a list."""
    return [name for part in text.split(",") if (name := part.strip())]


def _is_list_of_text(hint: Any) -> bool:
    parts = _parts(hint)
    return str not in parts and any(get_origin(p) is list and _takes(get_args(p)[0], str) for p in parts)


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def adapter(hint: Any) -> TypeAdapter[Any]:
    """The strict adapter of an annotation."""
    name = repr(hint)
    if name not in _ADAPTERS:
        _ADAPTERS[name] = TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))
    return _ADAPTERS[name]


def type_text(hint: Any) -> str:
    """An annotation in words: ``a whole number of at least 1``."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, *marks = get_args(hint)
        bounds = [b for m in marks for b in _bound_texts(m)]
        return f"{type_text(base)} {' and '.join(bounds)}".strip()
    if origin is Literal:
        choices = [json.dumps(c) if not isinstance(c, str) else c for c in get_args(hint)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if origin in _UNION:
        return " or ".join(type_text(a) for a in get_args(hint))
    if origin in (list, tuple, set, frozenset):
        item = next(iter(get_args(hint)), Any)
        return "a list" if item is Any else f"a list of {_plural(item)}"
    if hint in (dict, Mapping) or origin in (dict, Mapping):
        return "a mapping"
    if dataclasses.is_dataclass(hint):
        return "a mapping"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _plural(item: Any) -> str:
    words = {int: "whole numbers", float: "numbers", str: "text"}
    if item in words:
        return words[item]
    return "mappings" if type_text(item) == "a mapping" else type_text(item)


def _bound_texts(mark: Any) -> list[str]:
    if isinstance(mark, annotated_types.Interval):
        if mark.ge is not None and mark.le is not None:
            return [f"from {mark.ge} to {mark.le}"]
        return [t for m in mark for t in _bound_texts(m)]
    if isinstance(mark, annotated_types.Ge):
        return [f"of at least {mark.ge}"]
    if isinstance(mark, annotated_types.Gt):
        return [f"above {mark.gt}"]
    if isinstance(mark, annotated_types.Le):
        return [f"of at most {mark.le}"]
    if isinstance(mark, annotated_types.Lt):
        return [f"below {mark.lt}"]
    return []


def _fix(hint: Any, value: Any) -> str:
    choices = [a for part in _parts(hint) if get_origin(part) is Literal for a in get_args(part)]
    if isinstance(value, str):
        near = get_close_matches(value, [c for c in choices if isinstance(c, str)], n=1, cutoff=0.5)
        if near:
            return near[0]
        lowered = value.lower()
        if _takes(hint, bool) and lowered in ("yes", "on", "y"):
            return "true"
        if _takes(hint, bool) and lowered in ("no", "off", "n"):
            return "false"
        if _takes_number(hint) and _is_number(value):
            return f"{value}, without quotes" if not _takes(hint, int) or value.lstrip("+-").isdigit() else ""
    if isinstance(value, bool | float) and _takes(hint, str) and not _takes_number(hint):
        return "put it in quotes"
    if isinstance(value, float) and value.is_integer() and _takes(hint, int):
        return f"{int(value)}"
    return ""


def _is_number(text: str) -> bool:
    try:
        return len(text) <= 40 and math.isfinite(float(text))
    except ValueError:
        return False


def _unusable(value: Any) -> str | None:
    """The fault of a value of any type that no path, file or tensor can represent, or None."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"a whole number has at most 64 bits; got {_shown(value)}."
    if isinstance(value, str):
        if "\0" in value:
            return "has a NUL character, which is not allowed."
        if any("\ud800" <= c <= "\udfff" for c in value):
            return f"is not UTF-8 text; got {_shown(value)}."
    if isinstance(value, Mapping | list):
        parts = [*value, *value.values()] if isinstance(value, Mapping) else value
        return next((r for part in parts if (r := _unusable(part)) is not None), None)
    return None


def _strip(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(_strip(hint)) if get_origin(_strip(hint)) in _UNION else (hint,)


def _parts(hint: Any) -> tuple[Any, ...]:
    return tuple(_strip(a) for a in _alternatives(hint))


def _takes(hint: Any, kind: type) -> bool:
    return kind in _parts(hint)


def _takes_number(hint: Any) -> bool:
    return _takes(hint, int) or _takes(hint, float)


def _holds_dataclass(hint: Any) -> type | None:
    bare = _strip(hint)
    if isinstance(bare, type) and dataclasses.is_dataclass(bare):
        return bare
    return next((found for a in get_args(bare) if (found := _holds_dataclass(a)) is not None), None)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**60:
        return f"{'-' if value < 0 else ''}a number of more than 60 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
