"""The keys of the task `kto`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from surogate_core.plugin import bundles


@dataclass(frozen=True, slots=True, kw_only=True)
class KTOOptions:
    """Keys of `task=kto`."""

    beta: Annotated[float, Gt(0), bundles.Flat("kto_beta")] = 0.1
    """β: how strongly the policy is held to the reference; a smaller value lets it move further."""
    desirable_weight: Annotated[float, Ge(0), bundles.Flat("kto_desirable_weight")] = 1.0
    """Weight of the loss of good answers. With unequal numbers of good and bad answers, the two weights times the two
    numbers should have a ratio between 1:1 and 4:3."""
    undesirable_weight: Annotated[float, Ge(0), bundles.Flat("kto_undesirable_weight")] = 1.0
    """Weight of the loss of bad answers."""
    loss_type: Annotated[Literal["kto", "apo_zero_unpaired"], bundles.Flat("kto_loss_type")] = "kto"
    """`kto`: answers are compared with the KL divergence from the reference, which is estimated from mismatched prompts
    and answers. `apo_zero_unpaired`: without it, at half the cost."""
