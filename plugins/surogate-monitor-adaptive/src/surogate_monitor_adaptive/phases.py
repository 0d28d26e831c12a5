"""Detects the phase of the training, and plateaus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from surogate_core.plugin import events
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

LEVEL = 25
"""Losses whose mean is a level of the training."""

RAISED = 0.15
"""Relative rise above the best level before it from which a level is raised, if noise does not explain it."""

RAISED_ERRORS = 5.0
"""Standard errors by which a raised level is above the best one. The best is the lowest of many: a healthy run is often
2 or 3 above it."""

HELD_OUT_RAISED = 0.1
"""Relative rise of the held-out loss above its best from which it is raised, if it also jumps."""

JUMPING = 0.1
"""Relative scatter of the last `JUMPS` held-out losses around their line from which they jump. Overfitting does not."""

LOST = 0.5
"""Relative rise above the best held-out loss from which a model has lost what it knew, if both the held-out loss and
the level of the training loss are there. Overfitting raises the held-out loss alone."""

JUMPS = 4

CONFIRMED = 25
"""Steps that a new phase must last before it is reported, because noise crosses the bounds for a few steps."""

PHASE_ERRORS = 2.0
"""Standard errors by which the loss must have risen for the phase, which must last `CONFIRMED` steps too."""

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


def phase_of(losses: Sequence[float], *, unstable: bool) -> Phase:
    """The phase that a window of losses, oldest first, is in.

    `unstable`: whether the loss is above what the run had reached. A loss that is still rising diverges.
    """
    if len(losses) <= WARMUP:
        return "warmup"
    improvement = improvement_of(losses)
    if improvement < DIVERGING and surely_rising(losses, PHASE_ERRORS):
        return "diverging"
    if unstable:
        return "unstable"
    return "converging" if improvement > CONVERGING else "plateau"


def surely_rising(losses: Sequence[float], errors: float = RISE_ERRORS) -> bool:
    """Whether the second half's mean is above the first's by more than noise explains."""
    half = len(losses) // 2
    before, after = losses[:half], losses[-half:]
    return mean(after) - mean(before) > errors * error_of(before, after)


def error_of(before: Sequence[float], after: Sequence[float]) -> float:
    """Standard error of the difference of two means."""
    return (deviation(before) ** 2 / len(before) + deviation(after) ** 2 / len(after)) ** 0.5


@dataclass(slots=True)
class LevelWatch(Detector):
    """Whether the losses are above what the run had reached: their level, not the scatter of single batches."""

    first: list[float] = field(default_factory=list)
    """The first losses, which are a level of their own: a rate far too high ruins the model at once."""
    best: list[float] = field(default_factory=list)
    """The losses of the lowest level so far; levels do not overlap."""
    now: list[float] = field(default_factory=list)
    """The last losses."""
    steps: int = 0
    held_out: list[float] = field(default_factory=list)
    """The last held-out losses."""
    best_held_out: float | None = None

    def observe(self, loss: float) -> None:
        """Take a finite training loss."""
        self.steps += 1
        if len(self.first) < LEVEL // 5:
            self.first.append(loss)
        push(self.now, loss, LEVEL)
        if self.steps % LEVEL == 0 and (not self.best or mean(self.now) < mean(self.best)):
            self.best = list(self.now)

    def observe_held_out(self, loss: float) -> None:
        """Take a finite held-out loss."""
        push(self.held_out, loss, JUMPS)
        if self.best_held_out is None or loss < self.best_held_out:
            self.best_held_out = loss

    @property
    def raised(self) -> bool:
        """Whether the last losses are above the best level, or the held-out losses jump or stay above their best."""
        return self._train_raised() or self._held_out_jumps() or self._lost()

    def _train_raised(self) -> bool:
        levels = [level for level in (self.first, self.best) if level]
        if len(self.now) < LEVEL or not levels:
            return False
        best = min(levels, key=mean)
        rise = mean(self.now) - mean(best)
        return relative(rise, mean(best)) > RAISED and rise > RAISED_ERRORS * error_of(best, self.now)

    def _lost(self) -> bool:
        best = self.best_held_out
        if best is None or len(self.now) < LEVEL:
            return False
        return min(relative(self.held_out[-1] - best, best), relative(mean(self.now) - best, best)) > LOST

    def _held_out_jumps(self) -> bool:
        losses, best = self.held_out, self.best_held_out
        if best is None or len(losses) < JUMPS or relative(losses[-1] - best, best) <= HELD_OUT_RAISED:
            return False
        return relative(scatter(losses), mean(losses)) > JUMPING


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

    def observe(self, step: int, loss: float, *, unstable: bool) -> events.PhaseChange | None:
        """Take a finite loss; return the change of phase that it confirms, if any. `unstable`: see `LevelWatch`."""
        push(self.losses, loss, WINDOW)
        now = phase_of(self.losses, unstable=unstable)
        if now != self.candidate:
            self.candidate, self.candidate_since = now, step
        if now == self.phase or step - self.candidate_since + 1 < CONFIRMED:
            return None
        previous, self.phase, self.since = self.phase, now, self.candidate_since
        return events.PhaseChange(step=step, phase=now, previous=previous, improvement=improvement_of(self.losses))

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
