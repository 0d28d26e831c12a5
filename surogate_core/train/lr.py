"""Learning-rate schedules, as one pure function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig

Kind = Literal["linear", "cosine", "wsd", "constant"]

WSD_COOLDOWN = 0.1
"""Share of all steps that wsd cools down over when `cooldown_steps` is 0."""


def warmup_length(*, total_steps: int, warmup_steps: int, warmup_ratio: float) -> int:
    """Warm-up in steps; a ratio is rounded up, as transformers does."""
    return warmup_steps or math.ceil(total_steps * warmup_ratio)


def learning_rate(
    step: int,
    *,
    total_steps: int,
    peak: float,
    kind: Kind,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
    final_fraction: float = 0.0,
) -> float:
    """The learning rate of optimizer step `step`, 0 for the first.

    Warm-up: step s of w has peak·(s+1)/w, so that no step is lost at rate 0 and the last has the peak.
    Then linear and cosine fall from the peak to final = peak·`final_fraction`, constant and wsd hold the
    peak; the decay ends at step `total_steps`, one past the last, as in transformers. The cool-down takes
    the last `cooldown_steps` and falls linearly to final from where the schedule is at its beginning.
    A warm-up and cool-down longer than the run are cut at its end, the warm-up served first.
    """
    assert 0 <= step < total_steps
    warmup = min(warmup_steps, total_steps)
    if kind == "wsd" and cooldown_steps == 0:
        cooldown_steps = math.ceil(total_steps * WSD_COOLDOWN)
    cooldown = min(cooldown_steps, total_steps - warmup)
    if step < warmup:
        return peak * (step + 1) / warmup

    final = peak * final_fraction

    def decayed(at: int) -> float:
        progress = (at - warmup) / (total_steps - warmup)
        if kind == "linear":
            return final + (peak - final) * (1.0 - progress)
        if kind == "cosine":
            return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
        return peak

    begin = total_steps - cooldown
    if step < begin:
        return decayed(step)
    return final + (decayed(begin) - final) * (total_steps - step) / cooldown


def rate_of(config: RunConfig, step: int, *, total_steps: int) -> float:
    """The learning rate that the configuration gives optimizer step `step`, 0 for the first."""
    return learning_rate(
        step,
        total_steps=total_steps,
        peak=config.learning_rate,
        kind=config.lr_scheduler_type,
        warmup_steps=warmup_length(
            total_steps=total_steps, warmup_steps=config.warmup_steps, warmup_ratio=config.warmup_ratio
        ),
        cooldown_steps=config.cooldown_steps,
        final_fraction=config.final_lr_fraction,
    )


def faded(scale: float, *, since: int, steps: int) -> float:
    """A factor that is `scale` at first and blends back to 1, linearly, `since` of `steps` steps later."""
    return scale + (1.0 - scale) * min(1.0, since / steps)
