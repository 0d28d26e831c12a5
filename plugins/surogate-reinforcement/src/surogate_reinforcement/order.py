"""Which problems of an environment are for training, in which order, and which are held out."""

from __future__ import annotations

HELD_OUT = 2**40
"""First held-out number of an environment without an end. Training never gets that far."""


def training_numbers(first: int, count: int, *, size: int | None, seed: int = 0) -> list[int]:
    """The problem numbers of the prompts `first` … `first + count - 1` of a run.

    An endless environment counts up. Otherwise each pass over the problems has an order of its own, drawn from
    `seed` and the number of the pass.
    """
    if size is None:
        return list(range(first, first + count))
    from surogate_core.service.data import epoch_order

    places = range(first, first + count)
    orders = {epoch: epoch_order(size, seed, epoch).tolist() for epoch in sorted({p // size for p in places})}
    return [orders[place // size][place % size] for place in places]


def held_out_numbers(count: int, *, size: int | None, held_out: int = 0) -> list[int]:
    """The numbers of at most `count` held-out problems: the `held_out` ones after the first `size`.

    An endless environment has as many as are wanted. Empty if nothing is held out.
    """
    if size is None:
        return list(range(HELD_OUT, HELD_OUT + count))
    return list(range(size, size + min(count, held_out)))
