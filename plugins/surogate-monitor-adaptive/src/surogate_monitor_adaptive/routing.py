"""How a mixture of experts is routed: against the run's own beginning, and against fixed limits until that is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from surogate_core.plugin import events
from surogate_monitor_adaptive.windows import Detector, deviation, mean, push

FIRST, LAST = 10, 60
"""Steps whose means are the run's beginning. Nothing fires before the first of them."""

ENOUGH = 25
"""Steps of those that must have been seen; a monitor without them keeps the fixed limits."""

UNEVEN, COLLAPSED = 3.0, 10.0
"""Fixed limits of the imbalance where the largest possible one is not known. Below the first nothing fires."""

HIGH, NEAR_MOST = 0.75, 0.9
"""Fixed limits as shares of the largest possible imbalance, E / K: all tokens on the same K of E experts."""

UNDERUSED, UNUSED = 0.8, 0.5
"""Fixed limits of the utilization."""

TWICE, THRICE = 2.0, 3.0
"""The imbalance is high above `TWICE` that of the beginning, and severe above `THRICE`."""

WAY_HIGH, WAY_SEVERE = 0.5, 0.8
"""Or above the beginning's by these shares of the way to the largest possible one, if that is less."""

FEWER, MANY_FEWER = 0.1, 0.2
"""Share of the experts that, beyond those of the beginning, get no token."""

NARROWER = 0.85
"""Share of the beginning's entropy below which routing has narrowed."""

HELD, HELD_SEVERE = 10, 3
"""Consecutive steps for which a limit must be exceeded: single batches say little."""

RISE, PARTS, PART = 1.25, 5, 20
"""The imbalance rises if `PARTS` consecutive means of `PART` steps rise, from the first to the last by this factor."""

WINDOW, FEWEST, SIGMAS = 100, 20, 3.0
"""An auxiliary loss jumps above mean + `SIGMAS`·σ of the last `WINDOW`, once there are `FEWEST`."""

RECENT = 100
"""Steps for which what was seen last still counts."""


FIGURES = ("imbalance", "worst_imbalance", "utilization", "entropy")
"""Figures of a step that are compared with the beginning."""


def figures_of(event: events.RoutingStats) -> dict[str, float]:
    """`FIGURES` of a step."""
    values = (event.moe_load_imbalance, event.moe_worst_imbalance, event.moe_expert_utilization, event.moe_entropy)
    return dict(zip(FIGURES, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingLimits:
    """What a step's figures are compared with."""

    uneven: float
    collapsed: float
    layer: float
    """Imbalance of the least even layer."""
    underused: float
    unused: float
    narrow: float


@dataclass(slots=True)
class RoutingMonitor(Detector):
    """Routing over a run."""

    seen: int = 0
    """Steps of the beginning that were seen."""
    sums: list[float] = field(default_factory=lambda: [0.0] * len(FIGURES))
    """Over those steps, of each of `FIGURES`."""
    held: dict[str, int] = field(default_factory=dict)
    """Rule → consecutive steps for which its limit has been exceeded."""
    imbalances: list[float] = field(default_factory=list)
    aux_losses: list[float] = field(default_factory=list)
    collapsed_at: int | None = None
    underused_at: int | None = None

    def beginning(self, step: int) -> dict[str, float] | None:
        """`FIGURES` of the run's beginning; None until it is over."""
        if step <= LAST or self.seen < ENOUGH:
            return None
        return {name: total / self.seen for name, total in zip(FIGURES, self.sums, strict=True)}

    def limits(self, event: events.RoutingStats) -> RoutingLimits:
        """The limits for a step."""
        choices, first = event.moe_experts_per_token, self.beginning(event.step)
        most = event.moe_experts / choices if choices else math.inf
        if first is None:
            known = most < math.inf
            return RoutingLimits(
                uneven=max(UNEVEN, HIGH * most) if known else UNEVEN,
                collapsed=max(UNEVEN, NEAR_MOST * most) if known else COLLAPSED,
                layer=max(UNEVEN, NEAR_MOST * most),
                underused=UNDERUSED,
                unused=UNUSED,
                narrow=0.0,
            )
        before, worst = first["imbalance"], first["worst_imbalance"]
        left = max(0.0, most - before)
        return RoutingLimits(
            uneven=max(UNEVEN, min(TWICE * before, before + WAY_HIGH * left)),
            collapsed=max(UNEVEN, min(THRICE * before, before + WAY_SEVERE * left)),
            layer=max(UNEVEN, worst + WAY_SEVERE * max(0.0, most - worst)),
            underused=first["utilization"] - FEWER,
            unused=first["utilization"] - MANY_FEWER,
            narrow=NARROWER * first["entropy"],
        )

    def observe(self, event: events.RoutingStats) -> list[str]:
        """Take the routing of a step; the names of the rules that fire, the worst of each kind."""
        step, limits = event.step, self.limits(event)
        if FIRST <= step <= LAST:
            self.sums = [total + figure for total, figure in zip(self.sums, figures_of(event).values(), strict=True)]
            self.seen += 1
        exceeded = {
            "expert_imbalance": event.moe_load_imbalance > limits.uneven,
            "expert_collapse": event.moe_load_imbalance > limits.collapsed,
            "layer_collapse": event.moe_worst_imbalance > limits.layer,
            "experts_underused": event.moe_expert_utilization < limits.underused,
            "experts_idle": event.moe_expert_utilization < limits.unused,
            "routing_narrows": event.moe_entropy < limits.narrow,
        }
        self.held = {
            rule: self.held.get(rule, 0) + 1 if is_so and step >= FIRST else 0 for rule, is_so in exceeded.items()
        }
        found = []
        for severe, mild in (("expert_collapse", "expert_imbalance"), ("experts_idle", "experts_underused")):
            if self.held[severe] >= HELD_SEVERE:
                found.append(severe)
            elif self.held[mild] >= HELD:
                found.append(mild)
        found += [rule for rule in ("layer_collapse", "routing_narrows") if self.held[rule] >= HELD]
        if {"expert_collapse", "experts_idle"} & set(found):
            self.collapsed_at = step
        if {"experts_underused", "experts_idle"} & set(found):
            self.underused_at = step
        push(self.imbalances, event.moe_load_imbalance, PARTS * PART)
        if self._rises() and "expert_collapse" not in found:
            found.append("expert_imbalance_rises")
        return found + self._aux_jump(event.moe_aux_loss_raw)

    def _rises(self) -> bool:
        """Whether the imbalance has risen over the whole window, above what is even anyway."""
        known = self.imbalances
        if len(known) < PARTS * PART:
            return False
        means = [mean(known[at : at + PART]) for at in range(0, PARTS * PART, PART)]
        rising = all(before < after for before, after in pairwise(means))
        return rising and means[-1] >= max(UNEVEN, RISE * means[0])

    def _aux_jump(self, loss: float | None) -> list[str]:
        if loss is None or not math.isfinite(loss):
            return []
        known = self.aux_losses
        jumped = len(known) >= FEWEST and loss > mean(known) + SIGMAS * deviation(known) + 1e-9
        self.aux_losses = [*known, loss][-WINDOW:]
        return ["aux_loss_spike"] if jumped else []

    def collapsed(self, step: int) -> bool:
        """Whether routing had collapsed lately."""
        return self.collapsed_at is not None and step - self.collapsed_at < RECENT

    def underused(self, step: int) -> bool:
        """Whether experts were underused lately."""
        return self.underused_at is not None and step - self.underused_at < RECENT
