"""The loss guard: when the loss or the gradient jumps, and what becomes of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from surogate_monitor_adaptive.windows import Detector, deviation, mean, push

WINDOW = 100
"""Steps without a jump that a new one is compared with."""

FEWEST = 20
"""Fewest of them to compare with so."""

EARLY_RATIO = 2.0
"""With fewer, a loss jumps above so many means, and `LEAST_RISE` above: a rate that is far too high shows at once."""

EARLIEST = 2
"""Steps before a loss can jump."""

SIGMAS = 3.0
LEAST_RISE = 0.5
"""A loss jumps above mean + `SIGMAS`·σ and `LEAST_RISE` above the mean."""

NORM_RATIO = 10.0
NORM_LIMIT = 100.0
"""A gradient norm jumps above `NORM_RATIO` means, or above `NORM_LIMIT` where the mean is not."""

NEW_LEVEL = 50
"""Jumps in a row after which the new level is taken for normal."""

SCALE = 0.5
TEMPORARY = 2
FADE_STEPS = 50
PERMANENT = 5
"""`TEMPORARY` reductions blend back over `FADE_STEPS`; up to `PERMANENT` more are for good."""

GRACE = 10
"""Steps that a reduction is given to work before the next."""

Kind = Literal["loss", "gradient", "not finite"]


def jump(loss: float, norm: float, losses: Sequence[float], norms: Sequence[float]) -> Kind | None:
    """What of a step is out of the ordinary, beside earlier losses and gradient norms."""
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
    """Multiply the learning rate by `scale`, for good when `fade_steps` is 0."""

    scale: float
    fade_steps: int
    number: int
    """1 for the first of the run."""


@dataclass(slots=True)
class LossGuard(Detector):
    """Jumps over a run, one step at a time, and the reductions that answer them."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    jumps_in_a_row: int = 0
    reductions: int = 0
    last_reduction: int | None = None

    def observe(self, loss: float, norm: float) -> Kind | None:
        """Take a step; what of it jumps."""
        kind = jump(loss, norm, self.losses, self.norms)
        self.jumps_in_a_row = self.jumps_in_a_row + 1 if kind else 0
        if kind == "not finite":
            return kind
        if self.jumps_in_a_row >= NEW_LEVEL:
            self.losses, self.norms, self.jumps_in_a_row = [], [], 0
        if not self.jumps_in_a_row:
            # A jump is kept out of what the next is compared with.
            push(self.losses, loss, WINDOW)
            push(self.norms, norm, WINDOW)
        return kind

    @property
    def exhausted(self) -> bool:
        """Whether no reduction is left."""
        return self.reductions >= TEMPORARY + PERMANENT

    def reduce(self, step: int) -> Reduction | None:
        """The answer to a jump at `step`; None while the last one may still work, and when none is left."""
        if self.exhausted or (self.last_reduction is not None and step - self.last_reduction < GRACE):
            return None
        self.reductions, self.last_reduction = self.reductions + 1, step
        fade = FADE_STEPS if self.reductions <= TEMPORARY else 0
        return Reduction(scale=SCALE, fade_steps=fade, number=self.reductions)
