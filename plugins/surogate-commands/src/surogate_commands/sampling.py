"""The flags of commands that sample: numbers, and what they make of a model's own settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import UserError

if TYPE_CHECKING:
    from surogate_core.plugin import bundles

NUMBERS: Mapping[str, Callable[[str], float]] = {
    "--temperature": float,
    "--top-k": int,
    "--top-p": float,
    "--min-p": float,
    "--repetition-penalty": float,
    "--seed": int,
}
"""Flags that are fields of `Sampling`."""

RANGES: Mapping[str, str] = {
    "temperature": "from 0, such as 0.7",
    "top_k": "from 0, such as 40",
    "top_p": "above 0 and at most 1, such as 0.9",
    "min_p": "from 0 to 1, such as 0.05",
    "repetition_penalty": "above 0, such as 1.1",
}
"""What `Sampling` takes, for messages."""


def number(flag: str, text: str, kind: Callable[[str], float], *, least: float | None = None) -> float:
    """The value of a flag; raises `UserError`."""
    what = "a whole number" if kind is int else "a number"
    try:
        value = kind(text)
    except ValueError as error:
        raise UserError(f"{flag} {text}: is not {what}. Fix: {flag} {'1' if kind is int else '0.7'}") from error
    if least is not None and value < least:
        raise UserError(f"{flag} {text}: must be at least {least:g}. Fix: {flag} {least:g}")
    return value


def flags_of(values: Mapping[str, float] | None) -> dict[str, float]:
    """The flags of a mapping from Python, such as ``{"top_p": 0.9}``; raises `UserError`."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in (values or {}).items()}
    if unknown := flags.keys() - NUMBERS:
        name = min(unknown).removeprefix("--").replace("-", "_")
        known = ", ".join(flag.removeprefix("--").replace("-", "_") for flag in NUMBERS)
        raise UserError(f"sampling: there is no {name!r}. Fix: choose from {known}")
    return {flag: number(flag, str(value), NUMBERS[flag]) for flag, value in flags.items()}


def sampling_of(flags: Mapping[str, float], base: bundles.Sampling, *, sampled: bool = False) -> bundles.Sampling:
    """The model's own sampling, changed by the flags. Filters ask for samples, and so does `sampled`, unless a
    temperature is given.
    """
    values: dict[str, Any] = {flag.strip("-").replace("-", "_"): value for flag, value in flags.items()}
    asks = sampled or values.keys() & {"top_k", "top_p", "min_p"}
    if base.temperature == 0 and asks and "temperature" not in values:
        values["temperature"] = 1.0
    try:
        return replace(base, **values)
    except ValueError as error:
        name, _, value = str(error).partition(" is ")
        flag = f"--{name.replace('_', '-')}"
        raise UserError(f"{flag} {value}: is out of range. Fix: a number {RANGES[name]}") from error
