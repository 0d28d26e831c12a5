"""Episodes of several ranks: all ranks have all of them, with every bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from surogate_task_grpo.exchange import gathered, packed, unpacked
from surogate_task_grpo.play import Played, TrainedSequence

from surogate_core.plugin import bundles
from surogate_testing.virtual import in_threads


def episode(number: int, sample: int = 0) -> Played:
    problem = bundles.EnvironmentProblem(
        messages=({"role": "user", "content": f"Say {number} \ud800"},), data={"answer": 3}
    )
    tokens = tuple(range(number, number + 4))
    one = TrainedSequence(ids=tokens, trained=[False, True, True, False], logprobs=[0.0, -1 / 3, math.nan, 0.0])
    return Played(
        key=(number, sample),
        problem=problem,
        samples=[one, TrainedSequence.of((5,))],
        replies=["é", ""],
        answers=[[{"role": "user", "content": "More"}]],
        reason="length",
        rewards={"b": 1 / 3, "a": None},
        length=2,
        used=3,
    )


def facts(played: Sequence[Played]) -> list[Any]:
    """What is recorded and trained on."""
    names = ("key", "replies", "answers", "reason", "fault", "detail", "length", "used")
    return [
        (
            *(getattr(one, name) for name in names),
            list(one.rewards.items()),
            None if one.problem is None else one.problem.messages,
            repr(one.samples),
        )
        for one in played
    ]


def test_episodes_come_back_with_every_bit() -> None:
    failed = Played(key=(8, 1), problem=None)
    failed.fail("exception", "ValueError: no")
    given = [episode(7), failed, episode(9)]
    assert facts(unpacked(packed(given))) == facts(given)
    assert unpacked(packed([])) == []


@pytest.mark.parametrize(("world", "prompts"), [(2, 5), (3, 3), (4, 2)])
def test_all_ranks_have_the_episodes_in_the_order_of_the_prompts(world: int, prompts: int) -> None:
    def rank(fabric: Any) -> list[Any]:
        together = fabric.mesh().together()
        own = range(prompts)[together.rank :: world]
        play = lambda: [episode(number, sample) for number in own for sample in range(2)]  # noqa: E731
        return facts(gathered(together, play, prompts=prompts, samples=2))

    assert in_threads(world, rank) == [facts([episode(n, s) for n in range(prompts) for s in range(2)])] * world


def test_a_signal_to_one_rank_stops_all() -> None:
    def rank(fabric: Any) -> str:
        together = fabric.mesh().together()

        def play() -> list[Played]:
            if together.rank:
                raise bundles.Stopped
            return [episode(0)]

        try:
            gathered(together, play, prompts=1, samples=1)
        except bundles.Stopped:
            return "stopped"
        return "played"

    assert in_threads(2, rank) == ["stopped"] * 2
