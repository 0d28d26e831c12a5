"""The loss guard: detects jumps of loss or gradient, and reduces the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from surogate_monitor_adaptive.windows import Detector, deviation, mean, push

WINDOW = 100
"""Steps without a jump that a new one is compared with."""

FEWEST = 20
"""Fewest such steps for a comparison by mean and σ."""

EARLY_RATIO = 2.0
"""With fewer steps, a loss jumps above this multiple of the mean and `LEAST_RISE` above it, so a rate that is far too
high is noticed at once.
"""

EARLIEST = 2
"""Steps before a loss can jump."""

SIGMAS = 3.0
LEAST_RISE = 0.5
"""A loss jumps above mean + `SIGMAS`·σ and `LEAST_RISE` above the mean."""

NORM_RATIO = 10.0
NORM_LIMIT = 100.0
"""A gradient norm jumps above `NORM_RATIO` times the mean, or above `NORM_LIMIT` if the mean is below it."""

NEW_LEVEL = 50
"""Consecutive jumps after which the new level counts as normal."""

SCALE = 0.5
TEMPORARY = 2
FADE_STEPS = 50
PERMANENT = 5
"""`TEMPORARY` reductions fade over `FADE_STEPS`; up to `PERMANENT` more are permanent."""

GRACE = 10
"""Least number of steps between two reductions."""

Kind = Literal["loss", "gradient", "not finite"]


def jump(loss: float, norm: float, losses: Sequence[float], norms: Sequence[float]) -> Kind | None:
    """The unusual figures of a step, compared with earlier losses and gradient norms."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return "not finite"
    if len(losses) < EARLIEST:
        return None
    centre = mean(losses)
    if len(losses) < FEWEST:
        return "loss" if loss > max(EARLY_RATIO * centre, centre + LEAST_RISE) else None
    if loss > centre + LEAST_RISE and loss > centre + SIGMAS * deviation(losses):
        return "loss"
    usual = mean(norms)
    if norm > NORM_RATIO * usual or norm > NORM_LIMIT >= usual:
        return "gradient"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Multiply the learning rate by `scale`, permanently if `fade_steps` is 0."""

    scale: float
    fade_steps: int
    number: int
    """1 for the first of the run."""


@dataclass(slots=True)
class LossGuard(Detector):
    """Detects jumps over a run, one step at a time, and decides the reductions."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    jumps_in_a_row: int = 0
    reductions: int = 0
    last_reduction: int | None = None

    def observe(self, loss: float, norm: float) -> Kind | None:
        """Take a step; return its figures that jump."""
        kind = jump(loss, norm, self.losses, self.norms)
        self.jumps_in_a_row = self.jumps_in_a_row + 1 if kind else 0
        if kind == "not finite":
            return kind
        if self.jumps_in_a_row >= NEW_LEVEL:
            self.losses, self.norms, self.jumps_in_a_row = [], [], 0
        if not self.jumps_in_a_row:
            # The next steps are not compared with a jump.
            push(self.losses, loss, WINDOW)
            push(self.norms, norm, WINDOW)
        return kind

    @property
    def exhausted(self) -> bool:
        """Whether no reduction is left."""
        return self.reductions >= TEMPORARY + PERMANENT

    def reduce(self, step: int) -> Reduction | None:
        """The reduction for a jump at `step`; None soon after the last one, and if none is left."""
        if self.exhausted or (self.last_reduction is not None and step - self.last_reduction < GRACE):
            return None
        self.reductions, self.last_reduction = self.reductions + 1, step
        fade = FADE_STEPS if self.reductions <= TEMPORARY else 0
        return Reduction(scale=SCALE, fade_steps=fade, number=self.reductions)
