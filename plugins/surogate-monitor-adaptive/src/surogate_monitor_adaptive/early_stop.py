"""Decides when to end a run before its last step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from surogate_monitor_adaptive.windows import Detector, deviation, mean, relative

EVALUATIONS = 5
"""Number of held-out losses in a score, and of consecutive evaluations that must agree."""

CONVERGED = 0.85
"""Convergence score above which a run has converged."""

FULL_SCATTER = 0.05
"""Coefficient of variation of the held-out losses at which stability is 0."""

FULL_IMPROVEMENT = 0.05
"""Relative improvement over the held-out losses at which improvement counts as 1."""

EFFICIENCY = 0.5
"""Share of the highest loss decrease per FLOP below which a run is not worth its compute."""

DIVERGING_STEPS = 200
PLATEAU_STEPS = 500


def convergence_score(losses: Sequence[float]) -> float:
    """0.6·stability + 0.4·(1 − improvement) of held-out losses, oldest first; 0 to 1.

    stability = 1 - CV / 5 %, improvement = relative fall from first to last / 5 %, both cut to [0, 1].
    """
    stability = 1 - min(1.0, relative(deviation(losses), mean(losses)) / FULL_SCATTER)
    improvement = min(1.0, max(0.0, relative(losses[0] - losses[-1], losses[0]) / FULL_IMPROVEMENT))
    return 0.6 * stability + 0.4 * (1 - improvement)


def training_flops(parameters: int, tokens: int) -> float:
    """6 · parameters · tokens (arXiv 2001.08361, section 2.1)."""
    return 6.0 * parameters * tokens


@dataclass(slots=True)
class EarlyStop(Detector):
    """The four criteria over a run."""

    losses: list[float] = field(default_factory=list)
    """Held-out losses, oldest first."""
    flops: list[float] = field(default_factory=list)
    """FLOPs of the run at each of them."""
    converged: int = 0
    """Consecutive evaluations with a score above `CONVERGED`."""
    inefficient: int = 0
    best_efficiency: float = 0.0
    """Highest decrease of the loss per FLOP over `EVALUATIONS` evaluations."""

    def at_evaluation(self, loss: float, flops: float) -> str | None:
        """Take a held-out loss; return the reason to stop, if any."""
        if not math.isfinite(loss):
            return None
        kept = EVALUATIONS + 1
        self.losses, self.flops = [*self.losses, loss][-kept:], [*self.flops, flops][-kept:]
        if len(self.losses) >= EVALUATIONS:
            score = convergence_score(self.losses[-EVALUATIONS:])
            self.converged = self.converged + 1 if score > CONVERGED else 0
            if self.converged >= EVALUATIONS:
                return f"converged: score {score:.3f} above {CONVERGED} for {self.converged} evaluations"
        if len(self.losses) == kept and self.flops[-1] > self.flops[0]:
            efficiency = (self.losses[0] - self.losses[-1]) / (self.flops[-1] - self.flops[0])
            self.best_efficiency = max(self.best_efficiency, efficiency)
            low = efficiency < EFFICIENCY * self.best_efficiency
            self.inefficient = self.inefficient + 1 if low else 0
            if self.inefficient >= EVALUATIONS:
                if not self.best_efficiency:
                    return f"the held-out loss has not fallen in {self.inefficient + EVALUATIONS - 1} evaluations"
                share = efficiency / self.best_efficiency
                return f"the loss falls at {share:.0%} of its best rate a FLOP, for {self.inefficient} evaluations"
        return None

    def at_step(self, *, diverging: int, plateau: int) -> str | None:
        """Take the number of steps in each phase; return the reason to stop, if any."""
        if diverging >= DIVERGING_STEPS:
            return f"the loss has been rising for {diverging} steps"
        if plateau >= PLATEAU_STEPS:
            return f"the loss has not improved for {plateau} steps"
        return None
