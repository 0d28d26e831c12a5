"""Symbolic dims and settings: names of ``config.json`` keys, read when a model is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surogate_core.errors import UserError

_MISSING = object()


def read_key(config: Mapping[str, Any], key: str, default: Any = _MISSING, *, null: Any = _MISSING) -> Any:
    """The value of a ``config.json`` key.

    `default`: the value of a key that is absent, or a function of the mapping that finds it. A key whose default is a
    function may also be null, with the same result. `null`: what null stands for otherwise; without it, null is
    refused, as transformers refuses it. Raises `UserError` naming the key when it is missing or may not be null.
    """
    value = config.get(key, _MISSING)
    if value is _MISSING or (value is None and callable(default)):
        if default is _MISSING:
            raise UserError(f"config.json: key `{key}` is missing. Fix: use a complete model directory.")
        return default(config) if callable(default) else default
    if value is not None:
        return value
    if null is _MISSING and default is not None:
        raise UserError(
            f"config.json: key `{key}` is null, and must have a value. Fix: use the model's own config.json."
        )
    return None if null is _MISSING else null


def not_computed(problems: Sequence[str]) -> UserError:
    """The refusal of a ``config.json`` that asks for what a model family does not compute, each `problem` with its key.

    It never advises to change the key of a trained model, which would make another model of it.
    """
    one = len(problems) == 1
    listed = f" {problems[0]}." if one else "".join(f"\n  - {problem}" for problem in problems) + "\n"
    return UserError(
        f"config.json:{listed} With {'this key' if one else 'these keys'} changed it would be another model. "
        f"Fix: install a plugin whose model family computes it (`surogate plugins list` shows those that are here), or "
        f"take another model."
    )


class Dim:
    """A size that is a key of ``config.json``, or a product or sum of such sizes.

    Read on a bound block or model it is the int.
    """

    def __init__(self, key: str, default: int | Callable[[Mapping[str, Any]], int] | None = None):
        self.label = key
        self._read: Callable[[Mapping[str, Any]], Any] = lambda c: read_key(
            c, key, _MISSING if default is None else default
        )

    @classmethod
    def _derived(cls, label: str, read: Callable[[Mapping[str, Any]], Any]) -> Dim:
        dim = cls.__new__(cls)
        dim.label, dim._read = label, read
        return dim

    def size(self, config: Mapping[str, Any]) -> int:
        """The size under a ``config.json`` mapping; a positive int."""
        value = self._read(config)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"config.json: `{self.label}` must be a positive integer, not {value!r}.")
        return value

    def __mul__(self, other: Dim | int) -> Dim:
        return Dim._derived(f"{self.label}·{_label(other)}", lambda c: self.size(c) * size_of(other, c))

    def __add__(self, other: Dim | int) -> Dim:
        return Dim._derived(f"{self.label}+{_label(other)}", lambda c: self.size(c) + size_of(other, c))

    def __get__(self, bound: Any, owner: type) -> Any:
        return self if bound is None else self.size(bound.config)

    def __repr__(self) -> str:
        return self.label


def size_of(dim: Dim | int, config: Mapping[str, Any]) -> int:
    """The size of a dim, or the int itself."""
    return dim if isinstance(dim, int) else dim.size(config)


def _label(dim: Dim | int) -> str:
    return str(dim) if isinstance(dim, int) else dim.label


class Setting:
    """A value of ``config.json`` that is not a size, e.g. ``Setting("rms_norm_eps")``.

    `default`, `null`: the values of a key that is absent and of one that is null, as `read_key` takes them.
    """

    def __init__(self, key: str, default: Any = _MISSING, *, null: Any = _MISSING):
        self.key, self.default, self.null = key, default, null

    def value(self, config: Mapping[str, Any]) -> Any:
        """The value under a ``config.json`` mapping."""
        return read_key(config, self.key, self.default, null=self.null)

    def __get__(self, bound: Any, owner: type) -> Any:
        return self if bound is None else self.value(bound.config)


Number = float | Setting | Callable[[Mapping[str, Any]], float]
"""A number, or how it is found in a ``config.json``."""


def number_of(
    value: Any,
    config: Mapping[str, Any],
    what: str,
    *,
    least: float = -math.inf,
    whole: bool = False,
    absent: float | None = None,
) -> float:
    """The number under a ``config.json`` mapping; `UserError` naming `what` for anything else, and for one below
    `least` or, if it has to be `whole`, with a fraction. `absent`: what null stands for, if it is allowed, such as no
    window.
    """
    if isinstance(value, Setting):
        if absent is not None and config.get(value.key, absent) is None:
            return absent
        what, value = f"`{value.key}`", value.value(config)
    elif callable(value):
        value = value(config)
    if value is None and absent is not None:
        return absent
    kinds = int if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value) or value < least:
        kind = "an integer" if whole else "a finite number"
        floor = "" if least == -math.inf else f" of at least {least:g}"
        raise UserError(f"config.json: {what} must be {kind}{floor}, not {value!r}.")
    return float(value)
