"""Numbers for people. Large ones have no exponent: 4,838 or 4.84k, never 4.84e+03."""

from __future__ import annotations

import math

_UNITS = ("", "k", "M", "G", "T")


def count(number: float) -> str:
    """``93.5k`` for 93500: three significant digits."""
    for unit in _UNITS:
        if abs(number) < 999.5 or unit == _UNITS[-1]:
            return f"{number:,.0f}{unit}" if unit == "" or abs(number) >= 999.5 else f"{number:.3g}{unit}"
        number /= 1000
    raise AssertionError("the last unit takes every number")


def significant(value: float, digits: int = 3) -> str:
    """`digits` significant digits: ``0.0123``, ``1e-05``, ``4,838``, ``inf``."""
    if math.isfinite(value) and abs(value) >= 10**digits - 0.5:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def rate(value: float) -> str:
    """``999``, ``4.84M``, but also ``0.25``: three significant digits of what may be small."""
    return count(value) if abs(value) >= 999.5 else significant(value)
