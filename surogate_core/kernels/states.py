"""The states that recurrences carry, in slots: [S, …] for the S slots of a cache.

The last slot is for rows that do not count. Several rows may have it; it holds zeros before and after each step, since
a row that is repeated for long could grow to infinity. Every other slot has one row at most. Shapes do not depend on
values, and nothing is read on the host, so a CUDA graph can contain a step. Shape suffixes: N rows, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


def put_states(states: Sequence[Tensor], slots_N: Tensor, after: Sequence[Tensor]) -> None:
    """Write what slots hold after a scan or a step."""
    for state, final in zip(states, after, strict=True):
        state[slots_N] = final
        state[-1].zero_()


def moved_on(
    step: Callable[[Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]], states: Sequence[Tensor], slots_N: Tensor
) -> Tensor:
    """y of `step`, from the states of these slots to (y, the states after it), which the slots then hold."""
    y, after = step([state[slots_N] for state in states])
    put_states(states, slots_N, after)
    return y
