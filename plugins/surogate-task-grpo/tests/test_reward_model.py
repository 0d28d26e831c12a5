"""Which conversations a reward model scores, and what becomes of scores; the model itself is replaced."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from surogate_task_grpo.packing import Shape
from surogate_task_grpo.reward_model import RewardModel, with_room

from surogate_core.plugin import UserError, bundles
from surogate_testing.virtual import in_threads

SHAPE = Shape(rows=2, sequence_len=64, documents=4, columns=(), padding_id=0)


def logits_of(weights: Any, batch: Any) -> Any:
    """[N, 1] in two parts: the sum of the tokens of a document so far, times 100 plus their number."""
    sums, total = [], 0
    for token, position in zip(batch.input_ids.tolist(), batch.positions.tolist(), strict=True):
        total = token if position == 0 else total + token
        sums.append(100.0 * total + position + 1)
    scores_N1 = torch.tensor(sums)[:, None]
    for part in (slice(0, 50), slice(50, None)):
        yield part, scores_N1[part]


@pytest.fixture
def judge() -> Any:
    made = RewardModel.__new__(RewardModel)
    made._shape, made._ending, made._weights = SHAPE, (2, 201), mock.sentinel.weights
    made._context = SimpleNamespace(stopped=lambda: False, together=bundles.Together())
    with mock.patch("surogate_task_grpo.reward_model.inference.logits_of", logits_of):
        yield made


def test_a_conversation_ends_as_the_template_ends_it(judge: Any) -> None:
    stops = frozenset({2, 0})
    assert judge.ended([5, 6, 2], stops) == [5, 6, 2, 201]
    assert judge.ended([5, 6, 0], stops) == [5, 6, 2, 201], "another stop token"
    assert judge.ended([5, 6], stops) == [5, 6, 2, 201], "a reply that was cut"


def test_each_conversation_has_the_score_of_its_own_last_token(judge: Any) -> None:
    conversations = [[number] * (3 + number * 5 % 61) for number in range(1, 30)]
    wanted = [100.0 * sum(ids) + len(ids) for ids in conversations]
    assert judge.scores(conversations) == wanted
    assert judge.scores(conversations[::-1]) == wanted[::-1]
    assert judge.scores([]) == []


def test_ranks_share_the_scoring(judge: Any) -> None:
    conversations = [[number] * (3 + number * 5 % 61) for number in range(1, 30)]
    wanted = judge.scores(conversations)

    def rank(fabric: Any) -> list[float]:
        made = RewardModel.__new__(RewardModel)
        made._shape, made._ending, made._weights = judge._shape, judge._ending, judge._weights
        made._context = SimpleNamespace(stopped=lambda: False, together=fabric.mesh().together())
        return made.scores(conversations)

    assert in_threads(3, rank) == [wanted] * 3


def test_a_signal_ends_the_scoring(judge: Any) -> None:
    judge._context = SimpleNamespace(stopped=lambda: True, together=bundles.Together())
    with pytest.raises(bundles.Stopped):
        judge.scores([[1]])


def test_an_environment_has_no_reward_of_its_name() -> None:
    assert with_room({"right": 1.0}) == {"right": 1.0, "reward_model": None}
    with pytest.raises(UserError, match="has a reward of the name reward_model"):
        with_room({"reward_model": math.pi})
