"""Detects the phase of the training, and plateaus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from surogate_core.events import PhaseChange
from surogate_monitor_adaptive.windows import Detector, deviation, mean, push, relative, scatter

Phase = Literal["warmup", "converging", "plateau", "diverging", "unstable"]

WINDOW = 100
"""Losses whose two halves are compared."""

WARMUP = 50
"""Steps at the beginning without a phase."""

CONVERGING = 0.001
"""Relative improvement above which the loss converges."""

DIVERGING = -0.01
"""Relative improvement below which it diverges."""

UNSTABLE = 0.15
"""Coefficient of variation above which the phase is unstable."""

CONFIRMED = 25
"""Steps that a new phase must last before it is reported, because noise crosses the bounds for a few steps."""

RISE_ERRORS = 3.0
"""Standard errors by which the loss must have risen before a divergence is reported."""

PLATEAU_PATIENCE = 3
"""Consecutive checks without an improvement."""

PLATEAU_COOLDOWN = 200
"""Steps between two reported plateaus."""


def improvement_of(losses: Sequence[float]) -> float:
    """Decrease of the mean from the first half of the window to the second, relative to the first."""
    half = len(losses) // 2
    before, after = mean(losses[:half]), mean(losses[-half:])
    return relative(before - after, before)


def phase_of(losses: Sequence[float]) -> Phase:
    """The phase that a window of losses, oldest first, is in.

    The coefficient of variation is that of the newer half around its regression line, so a loss that falls quickly does
    not count as unstable.
    """
    if len(losses) <= WARMUP:
        return "warmup"
    recent = losses[-(len(losses) // 2) :]
    if relative(scatter(recent), mean(recent)) > UNSTABLE:
        return "unstable"
    improvement = improvement_of(losses)
    if improvement > CONVERGING:
        return "converging"
    return "plateau" if improvement >= DIVERGING else "diverging"


def surely_rising(losses: Sequence[float]) -> bool:
    """Whether the second half's mean is above the first's by more than noise explains."""
    half = len(losses) // 2
    before, after = losses[:half], losses[-half:]
    error = (deviation(before) ** 2 / half + deviation(after) ** 2 / half) ** 0.5
    return mean(after) - mean(before) > RISE_ERRORS * error


@dataclass(slots=True)
class PhaseDetector(Detector):
    """The phase over a run, one loss a step."""

    losses: list[float] = field(default_factory=list)
    phase: Phase = "warmup"
    """The last that lasted `CONFIRMED` steps."""
    since: int = 0
    """The step at which it began."""
    candidate: Phase = "warmup"
    candidate_since: int = 0

    def observe(self, step: int, loss: float) -> PhaseChange | None:
        """Take a finite loss; return the change of phase that it confirms, if any."""
        push(self.losses, loss, WINDOW)
        now = phase_of(self.losses)
        if now != self.candidate:
            self.candidate, self.candidate_since = now, step
        if now == self.phase or step - self.candidate_since + 1 < CONFIRMED:
            return None
        previous, self.phase, self.since = self.phase, now, self.candidate_since
        return PhaseChange(step=step, phase=now, previous=previous, improvement=improvement_of(self.losses))

    def steps_in(self, phase: Phase, step: int) -> int:
        """Steps that the run has been in `phase`; 0 if it is in another."""
        return step - self.since + 1 if self.phase == phase else 0


@dataclass(slots=True)
class PlateauDetector(Detector):
    """Compares the mean of every half window with the best one before."""

    losses: list[float] = field(default_factory=list)
    best: float | None = None
    best_step: int = 0
    flat_checks: int = 0
    quiet_until: int = 0

    def observe(self, step: int, loss: float) -> bool:
        """Take a finite loss; return whether to report a plateau now."""
        self.losses = [*self.losses, loss]
        if len(self.losses) < WINDOW // 2:
            return False
        now, self.losses = mean(self.losses), []
        if self.best is None or relative(self.best - now, self.best) > CONVERGING:
            self.best, self.best_step, self.flat_checks = now, step, 0
            return False
        self.flat_checks += 1
        if self.flat_checks < PLATEAU_PATIENCE or step < self.quiet_until:
            return False
        self.flat_checks, self.quiet_until = 0, step + PLATEAU_COOLDOWN
        return True

    def flat_steps(self, step: int) -> int:
        """Steps since the best half window."""
        return step - self.best_step if self.best is not None else 0
