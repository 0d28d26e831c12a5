"""The keys of the task `reward`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from surogate_core.plugin import bundles


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOptions:
    """Keys of `task=reward`."""

    margin: Annotated[float, Ge(0), bundles.Flat("reward_margin")] = 0.0
    """Margin by which the score of the chosen answer should exceed the score of the rejected one."""
    centre: Annotated[float, Ge(0), bundles.Flat("reward_centre")] = 0.0
    """Weight of the squared sum of the two scores, which keeps the scores around 0 (arXiv 2312.09244); 0.01 is usual.
    TRL calls it `center_rewards_coefficient`."""
