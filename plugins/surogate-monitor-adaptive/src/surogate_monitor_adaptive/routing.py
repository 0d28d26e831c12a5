"""How a mixture of experts is routed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from surogate_core.events import RoutingStats
from surogate_monitor_adaptive.windows import Detector, deviation, mean

IMBALANCED, COLLAPSED = 3.0, 10.0
"""Imbalance above which routing is uneven, and above which it has collapsed."""

UNDERUSED, UNUSED = 0.8, 0.5
"""Utilization below which experts are underused, and below which half of them are idle."""

WINDOW, FEWEST, SIGMAS = 100, 20, 3.0
"""An auxiliary loss jumps above mean + `SIGMAS`·σ of the last `WINDOW`, once there are `FEWEST`."""

RECENT = 100
"""Steps for which what was seen last still counts."""


@dataclass(slots=True)
class RoutingMonitor(Detector):
    """Routing over a run."""

    aux_losses: list[float] = field(default_factory=list)
    collapsed_at: int | None = None
    underused_at: int | None = None

    def observe(self, event: RoutingStats) -> list[str]:
        """Take the routing of a step; the names of the rules that fire, the worst of each kind."""
        found = []
        if event.moe_load_imbalance > COLLAPSED:
            found.append("expert_collapse")
        elif event.moe_load_imbalance > IMBALANCED:
            found.append("expert_imbalance")
        if event.moe_expert_utilization < UNUSED:
            found.append("experts_idle")
        elif event.moe_expert_utilization < UNDERUSED:
            found.append("experts_underused")
        if {"expert_collapse", "experts_idle"} & set(found):
            self.collapsed_at = event.step
        if event.moe_expert_utilization < UNDERUSED:
            self.underused_at = event.step
        if event.moe_aux_loss_raw is not None and math.isfinite(event.moe_aux_loss_raw):
            known = self.aux_losses
            if len(known) >= FEWEST and event.moe_aux_loss_raw > mean(known) + SIGMAS * deviation(known) + 1e-9:
                found.append("aux_loss_spike")
            self.aux_losses = [*known, event.moe_aux_loss_raw][-WINDOW:]
        return found

    def collapsed(self, step: int) -> bool:
        """Whether routing had collapsed lately."""
        return self.collapsed_at is not None and step - self.collapsed_at < RECENT

    def underused(self, step: int) -> bool:
        """Whether experts were underused lately."""
        return self.underused_at is not None and step - self.underused_at < RECENT
