"""Published advantages.

A completion without a reward (NaN) counts in no mean and no deviation.
Shape suffixes: P prompts, G completions of each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from surogate_core.plugin import bundles

Values = NDArray[np.float64]
Lengths = NDArray[np.int64]

EPSILON = 1e-4
"""Added to a standard deviation or a mean before it divides, as in TRL and verl."""


def group(rewards_PG: Values, lengths_PG: Lengths) -> Values:
    """(r - mean) / (std + 1e-4) of the prompt's completions; std with n - 1. GRPO, arXiv:2402.03300."""
    return _centred(rewards_PG) / (_deviation(rewards_PG, axis=1) + EPSILON)


def batch(rewards_PG: Values, lengths_PG: Lengths) -> Values:
    """(r - mean of the prompt) / (std of the whole step + 1e-4); std with n - 1. arXiv:2508.08221."""
    return _centred(rewards_PG) / (_deviation(rewards_PG, axis=None) + EPSILON)


def mean(rewards_PG: Values, lengths_PG: Lengths) -> Values:
    """r - mean of the prompt. Dr. GRPO, arXiv:2503.20783."""
    return _centred(rewards_PG)


def rloo(rewards_PG: Values, lengths_PG: Lengths) -> Values:
    """r - mean of the prompt's other completions = n / (n - 1) · (r - mean); 0 if there is no other.

    arXiv:2402.14740.
    """
    count_P1 = _counts(rewards_PG)
    return _centred(rewards_PG) * count_P1 / np.maximum(count_P1 - 1, 1)


def maxrl(rewards_PG: Values, lengths_PG: Lengths) -> Values:
    """(r - mean) / mean of the prompt, for rewards that are not negative; 0 where the mean is not above 0.

    Rare successes weigh more: with rewards of 0 and 1 it is the maximum-likelihood gradient. arXiv:2602.02710.
    """
    mean_P1 = _mean(rewards_PG, np.ones_like(rewards_PG))
    return np.where(mean_P1 > 0, _centred(rewards_PG) / np.where(mean_P1 > 0, mean_P1, 1.0), 0.0)


def opo(rewards_PG: Values, lengths_PG: Lengths) -> Values:
    """r - mean of the prompt weighted by length, the baseline with the least variance. OPO, arXiv:2505.23585."""
    return rewards_PG - _mean(rewards_PG, lengths_PG.astype(np.float64))


def _centred(rewards_PG: Values) -> Values:
    return rewards_PG - _mean(rewards_PG, np.ones_like(rewards_PG))


def _mean(rewards_PG: Values, weights_PG: Values) -> Values:
    """[P, 1]: the weighted mean of each prompt's rewards; 0 where it has none."""
    weights_PG = np.where(np.isnan(rewards_PG), 0.0, weights_PG)
    total_P1 = weights_PG.sum(1, keepdims=True)
    summed_P1 = (np.nan_to_num(rewards_PG) * weights_PG).sum(1, keepdims=True)
    return summed_P1 / np.where(total_P1 > 0, total_P1, 1.0)


def _counts(rewards_PG: Values) -> Values:
    return (~np.isnan(rewards_PG)).sum(1, keepdims=True).astype(np.float64)


def _deviation(rewards_PG: Values, axis: int | None) -> Values:
    """The standard deviation with n - 1 of each prompt, [P, 1], or of all rewards; 0 for fewer than two."""
    rewards = rewards_PG if axis is not None else rewards_PG.reshape(1, -1)
    count = _counts(rewards)
    squared = np.nan_to_num(_centred(rewards)) ** 2
    return np.sqrt(squared.sum(1, keepdims=True) / np.maximum(count - 1, 1))


ADVANTAGES = (
    bundles.AdvantageSpec(name="group", build=lambda options: group),
    bundles.AdvantageSpec(name="batch", build=lambda options: batch),
    bundles.AdvantageSpec(name="mean", build=lambda options: mean),
    bundles.AdvantageSpec(name="rloo", build=lambda options: rloo),
    bundles.AdvantageSpec(name="maxrl", build=lambda options: maxrl),
    bundles.AdvantageSpec(name="opo", build=lambda options: opo),
)
