"""The gradient norm over the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from surogate_monitor_adaptive.windows import Detector, mean, push, relative, slope

WINDOW = 20
"""Number of gradient norms in the window."""

ACCELERATION = 1.0
"""Rise of the trend over the window, as a share of the mean, above which the norm accelerates."""

HALVES = 1.5
"""The same for the ratio of the halves' medians, because one outlier tilts a line, but not a median."""

USUAL_WINDOW = 100
"""Length of the longer window, whose median the norms must exceed too: a norm that falls and recovers does not
accelerate.
"""

SETTLED = 50
"""Norms before an acceleration is reported, because early norms rise and fall with the learning rate's warm-up."""

VANISHED = 0.01
"""Share of the highest window mean below which gradients have vanished."""

UNLEARNED = 0.5
"""Share of the first window's mean loss above which small gradients do not mean that the model has learnt
everything.
"""


def acceleration_of(norms: Sequence[float]) -> float:
    """Rise of the least-squares line over the window, relative to the mean."""
    return relative(slope(norms) * len(norms), mean(norms))


def accelerates(norms: Sequence[float], usual: Sequence[float]) -> bool:
    """Whether the norms of a full window rise steeply, above those of the longer window `usual`."""
    half = len(norms) // 2
    after = _middle(norms[-half:])
    return (
        after > HALVES * _middle(norms[:half])
        and acceleration_of(norms) > ACCELERATION
        and after > HALVES * _middle(usual)
    )


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


@dataclass(slots=True)
class GradientTracker(Detector):
    """Mean, maximum and trend of the norm, one value per step."""

    norms: list[float] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)
    """The last `USUAL_WINDOW` norms."""
    losses: list[float] = field(default_factory=list)
    highest_mean: float = 0.0
    first_loss: float | None = None
    """Mean of the first full window."""

    def observe(self, norm: float, loss: float) -> None:
        """Take a finite norm and loss."""
        push(self.norms, norm, WINDOW)
        push(self.losses, loss, WINDOW)
        push(self.usual, norm, USUAL_WINDOW)
        if len(self.norms) == WINDOW:
            self.highest_mean = max(self.highest_mean, mean(self.norms))
            if self.first_loss is None:
                self.first_loss = mean(self.losses)

    @property
    def accelerating(self) -> bool:
        """Whether the norm rises steeply."""
        return len(self.usual) > SETTLED and accelerates(self.norms, self.usual)

    @property
    def vanishing(self) -> bool:
        """Whether gradients have almost vanished while the loss is still high."""
        if len(self.norms) < WINDOW or self.first_loss is None:
            return False
        return mean(self.norms) < VANISHED * self.highest_mean and mean(self.losses) > UNLEARNED * self.first_loss

    def figures(self) -> dict[str, float]:
        """Mean, maximum and trend per step of the window."""
        return {"mean": mean(self.norms), "max": max(self.norms), "trend": slope(self.norms)}
