"""Advantages: how much better a completion is than the others, from the rewards of a step.

Shape suffixes: P prompts, G completions of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_core.bundles.options import NoOptions, options_from_flat
from surogate_core.bundles.parts import Part, fault
from surogate_core.errors import PluginError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from surogate_core.bundles.handed import RunKeys

    Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpec:
    """A way to compute advantages from rewards."""

    name: str
    """The value of a task's key such as `advantage`."""
    build: Callable[[Any], Callable[[Any, Any], Any]]
    """Options → the function (rewards_PG float64, lengths_PG int64: tokens that were sampled) → advantages_PG float64,
    arrays of NumPy. A completion without a reward has NaN; its advantage is set to 0 whatever the function returns for
    it. The prompts are those of one step, refills included."""
    options: type = NoOptions
    """Dataclass of its own options. Every field has a default and a flat key, `Annotated[T, Flat("key")]`."""

    def options_of(self, config: RunKeys) -> Any:
        """The options, which flat keys of the configuration set."""
        return options_from_flat(self.options, config.flat)


def advantages(part: Part, rewards_PG: Values, lengths_PG: NDArray[np.int64]) -> Values:
    """The advantages of a step's completions: finite, and 0 where there is no reward. `part`: a built `AdvantageSpec`.

    Raises `PluginError` when the function fails, or returns another shape or a value that is not finite.
    """
    import numpy as np

    missing_PG = np.isnan(rewards_PG)
    try:
        found = np.asarray(part.built(rewards_PG.copy(), lengths_PG.copy()), np.float64)
    except Exception as error:
        raise PluginError(f"{part.label} failed: {fault(error)}") from error
    if found.shape != rewards_PG.shape:
        raise PluginError(
            f"{part.label} returned the shape {found.shape}, not that of the rewards, {rewards_PG.shape}."
        )
    found = np.where(missing_PG, 0.0, found)
    if not np.isfinite(found).all():
        prompt, sample = np.argwhere(~np.isfinite(found))[0]
        raise PluginError(
            f"{part.label} returned {found[prompt, sample]} for prompt {prompt}, completion {sample}, whose "
            f"reward is {rewards_PG[prompt, sample]}."
        )
    return found
