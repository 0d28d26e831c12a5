"""A learning rate far outside of what trains, which a run says once at its start.

It is no error: a sweep may look for the border on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """Peak learning rates of AdamW with which a kind of training usually works."""

    what: str
    low: float
    high: float
    start: float
    """A rate to begin with."""


LORA = Usual(what="LoRA adapters", low=2e-5, high=1e-3, start=2e-4)
FULL = Usual(what="all weights of a trained model", low=1e-6, high=1e-4, start=1e-5)
SCRATCH = Usual(what="a model from random weights", low=1e-4, high=5e-3, start=1e-3)
FAR = 10
"""Factor outside of the usual rates from which a run warns."""


def rate_note(rate: float, *, lora: bool, from_scratch: bool, optimizer: str, scale: float) -> str | None:
    """A warning, or None for a rate that may work. `scale`: the optimizer's rates as a multiple of AdamW's."""
    usual = SCRATCH if from_scratch else LORA if lora else FULL
    low, high, start = (scale * value for value in (usual.low, usual.high, usual.start))
    if low / FAR <= rate <= high * FAR:
        return None
    side, result = "below", "hardly anything will be learnt"
    if rate > high:
        side, result = "above", "the loss will probably diverge"
    return (
        f"learning_rate={rate:g} is far {side} what usually trains {usual.what} with {optimizer} "
        f"({low:g} to {high:g}): {result}. Try learning_rate={start:g}."
    )
