"""States in slots: a step reads and writes those of its rows, and what does not count remains zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surogate_core.kernels.states import moved_on, put_states


def test_a_step_writes_the_slots_of_its_rows() -> None:
    states = [torch.arange(5.0)[:, None].repeat(1, 2), torch.ones(5, 3)]
    for state in states:
        state[-1] = 0
    before = [state.clone() for state in states]
    slots = torch.tensor([3, 4, 0, 4])

    def step(given: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        assert all(torch.equal(g, b[slots]) for g, b in zip(given, before, strict=True))
        return given[0] * 2, [state + 10 for state in given]

    y = moved_on(step, states, slots)
    assert torch.equal(y, before[0][slots] * 2)
    for state, old in zip(states, before, strict=True):
        assert torch.equal(state[[1, 2]], old[[1, 2]])
        assert torch.equal(state[[3, 0]], old[[3, 0]] + 10)
        assert not state[-1].any()


def test_runs_of_the_last_slot_leave_zeros() -> None:
    state = torch.zeros(3, 2)
    put_states([state], torch.tensor([2, 0, 2]), [torch.tensor([[9.0, 9], [1, 2], [8, 8]])])
    assert torch.equal(state, torch.tensor([[1.0, 2], [0, 0], [0, 0]]))
