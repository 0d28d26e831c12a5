"""Standard errors of measured figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean_stderr(scores: Sequence[float]) -> float:
    """The standard error of a mean; NaN for one score."""
    return statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan


def ratio_stderr(sums: Sequence[tuple[float, float]], mean: float) -> float:
    """The standard error of a ratio of sums over documents (Cochran, Sampling Techniques, 1977, section 2.11)."""
    count = len(sums)
    if count < 2:
        return math.nan
    spread = math.fsum((value - mean * weight) ** 2 for value, weight in sums)
    return math.sqrt(spread * count / (count - 1)) / math.fsum(weight for _, weight in sums)
