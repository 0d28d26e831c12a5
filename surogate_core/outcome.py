"""Whether a run made the model better, in words: the same in the console, the report and the model card."""

from __future__ import annotations

import math


def verdict(
    what: str,
    first: float | None,
    last: float | None,
    best: float | None,
    best_step: int | None,
    *,
    higher: bool = False,
) -> str:
    """A sentence if the held-out measure `what` ends worse than it began, or was never better; otherwise empty.

    `first`: of step 0. `last`: of the last evaluation after it; None without one. `best`: the best of all, step 0
    included; None is `last`. `higher`: whether more is better.
    """
    if first is None or last is None:
        return ""
    best = last if best is None else best
    if not (best > first if higher else best < first):
        return f"No step was better than the start: the {what} was {first:.4f} before the first step."
    worse = not math.isfinite(last) or (last < first if higher else last > first)
    if worse and best_step is not None:
        return (
            f"The last step is worse than the start: the {what} was {first:.4f} before the first step and "
            f"{best:.4f} at step {best_step:,}, the best."
        )
    return ""
