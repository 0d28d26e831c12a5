"""Statistics of a window of values, and the state of what watches one. Nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from typing import Any


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of at least one value, as of a whole population."""
    centre = mean(values)
    return math.sqrt(math.fsum([(value - centre) * (value - centre) for value in values]) / len(values))


def slope(values: Sequence[float]) -> float:
    """Rise a step of the least-squares line through at least two values."""
    middle = (len(values) - 1) / 2
    products = math.fsum([(at - middle) * value for at, value in enumerate(values)])
    return products / (len(values) * (len(values) ** 2 - 1) / 12)


def scatter(values: Sequence[float]) -> float:
    """Standard deviation around the least-squares line: noise without the trend."""
    count, centre = len(values), mean(values)
    middle, spread = (count - 1) / 2, (count**2 - 1) / 12
    apart = [value - centre for value in values]
    rise = math.fsum([(at - middle) * value for at, value in enumerate(apart)]) / (count * spread)
    variance = math.fsum([value * value for value in apart]) / count
    return math.sqrt(max(0.0, variance - rise * rise * spread))


def push(window: list[float], value: float, limit: int) -> None:
    """Put a value at the end, and the oldest of more than `limit` out; in place, as it is done at every step."""
    window.append(value)
    if len(window) > limit:
        del window[0]


def relative(change: float, to: float) -> float:
    """`change` as a share of the size of `to`."""
    return change / max(abs(to), 1e-12)


@dataclass(slots=True)
class Detector:
    """Something that watches a stream; its fields are JSON values, and all that it remembers."""

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return asdict(self)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; raises `ValueError` for that of another version."""
        names = {field.name for field in fields(self)}
        if state.keys() != names:
            raise ValueError(f"{type(self).__name__}: the state has other fields: {sorted(state.keys() ^ names)}")
        for name in names:
            # A copy: windows are changed in place.
            setattr(self, name, deepcopy(state[name]))
