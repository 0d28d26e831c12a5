"""Which micro-batches of a step each rank runs."""

from __future__ import annotations


def share_of(micro_batches: int, *, rank: int, world: int, interleaved: bool) -> range:
    """Numbers of the micro-batches that a rank runs: a run of neighbours, or `interleaved` every `world`-th.

    `world` divides `micro_batches`.
    """
    assert micro_batches % world == 0
    if interleaved:
        return range(rank, micro_batches, world)
    own = micro_batches // world
    return range(rank * own, (rank + 1) * own)
