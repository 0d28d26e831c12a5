"""Checks of advantages, on a few rewards.

Shape suffixes: P prompts, G completions of each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from surogate_core.plugin import advantages, bundles
from surogate_testing.check import ensure

Values = NDArray[np.float64]
Lengths = NDArray[np.int64]

REWARDS_PG = np.array([[0.0, 1.0, 1.0, 0.0], [1.0, 0.5, 0.25, 0.75], [0.0, 0.0, 1.0, 0.0]])
LENGTHS_PG = np.array([[3, 5, 2, 8], [1, 1, 4, 9], [7, 6, 5, 4]])


def _advantages(spec: bundles.AdvantageSpec, rewards_PG: Values, lengths_PG: Lengths) -> Values:
    """Those with default options."""
    return advantages(bundles.part_of("advantage", spec), rewards_PG, lengths_PG)


def gives_a_number_for_each_completion(spec: bundles.AdvantageSpec) -> None:
    """[P, G] float64, finite; also for groups with equal rewards, and where rewards are missing."""
    equal_PG = np.array([[1.0] * 4, [0.0] * 4, [-2.0] * 4])
    missing_PG = REWARDS_PG.copy()
    missing_PG[0, 1], missing_PG[1] = np.nan, np.nan
    for rewards_PG in (REWARDS_PG, equal_PG, missing_PG, REWARDS_PG[:1]):
        _advantages(spec, rewards_PG, LENGTHS_PG[: len(rewards_PG)])


def depends_on_rewards_and_lengths_alone(spec: bundles.AdvantageSpec) -> None:
    """Equal rewards and lengths give equal bits: a run that was killed and resumed repeats them."""
    first, second = (_advantages(spec, REWARDS_PG, LENGTHS_PG).tobytes() for _ in range(2))
    ensure(first == second, "equal rewards give other advantages the second time")


def prefers_the_higher_reward(spec: bundles.AdvantageSpec) -> None:
    """Within a prompt's completions the highest reward has the largest advantage."""
    found_PG = _advantages(spec, REWARDS_PG, np.full_like(LENGTHS_PG, 4))
    for rewards_G, found_G in zip(REWARDS_PG, found_PG, strict=True):
        best, worst = found_G[rewards_G.argmax()], found_G[rewards_G.argmin()]
        ensure(best == found_G.max() and best > worst, f"the advantages of rewards {rewards_G} are {found_G}")


CHECKS = (
    gives_a_number_for_each_completion,
    depends_on_rewards_and_lengths_alone,
    prefers_the_higher_reward,
)
