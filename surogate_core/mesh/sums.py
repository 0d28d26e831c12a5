"""How many parts a step's sums have: the same for 1, 2, 4 and 8 ranks, so that their bits are the same."""

from __future__ import annotations

LANES = 8
"""Most lanes of a step, so the largest number of ranks that give equal bits."""


def lanes_of(micro_batches: int) -> int:
    """Lanes into which a step's micro-batches are divided: the largest power of two that divides them, 8 at most."""
    return min(micro_batches & -micro_batches, LANES)


def lanes_for(ranks: int) -> int:
    """Lanes of steps of any number of micro-batches: `LANES`, or one for each rank if `ranks` does not divide it."""
    return LANES if LANES % ranks == 0 else ranks
