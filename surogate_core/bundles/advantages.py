"""Advantages: how much better a completion is than the others, from the rewards of a step.

Shape suffixes: P prompts, G completions of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_core.errors import PluginError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpec:
    """A way to compute advantages from rewards."""

    name: str
    """The value of a task's key such as `advantage`."""
    compute: Callable[[Any, Any], Any]
    """(rewards_PG float64, lengths_PG int64: tokens that were sampled) → advantages_PG float64, arrays of NumPy. A
    completion without a reward has NaN; its advantage is set to 0 whatever `compute` returns for it. The prompts are
    those of one step, refills included."""


def advantages(spec: AdvantageSpec, rewards_PG: Values, lengths_PG: NDArray[np.int64]) -> Values:
    """The advantages of a step's completions: finite, and 0 where there is no reward.

    Raises `PluginError` when the function fails, or returns another shape or a value that is not finite.
    """
    import numpy as np

    missing_PG = np.isnan(rewards_PG)
    try:
        found = np.asarray(spec.compute(rewards_PG.copy(), lengths_PG.copy()), np.float64)
    except Exception as error:
        raise PluginError(f"advantage {spec.name} failed: {type(error).__name__}: {error}") from error
    if found.shape != rewards_PG.shape:
        raise PluginError(
            f"advantage {spec.name} returned the shape {found.shape}, not that of the rewards, {rewards_PG.shape}."
        )
    found = np.where(missing_PG, 0.0, found)
    if not np.isfinite(found).all():
        prompt, sample = np.argwhere(~np.isfinite(found))[0]
        raise PluginError(
            f"advantage {spec.name} returned {found[prompt, sample]} for prompt {prompt}, completion {sample}, whose "
            f"reward is {rewards_PG[prompt, sample]}."
        )
    return found
