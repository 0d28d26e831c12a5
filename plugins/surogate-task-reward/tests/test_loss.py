"""The loss of a reward model against plain autograd in float64 and numbers computed by hand.

Shape suffixes: N tokens of a micro-batch, V outputs of the head.
"""

from __future__ import annotations

import math

import pytest
import torch
from surogate_task_reward.loss import PREFERRED, sequence_loss, token_loss
from surogate_task_reward.options import RewardOptions
from torch import Tensor

LENGTHS, SIDES = (4, 3, 2, 6, 5), (1.0, -1.0, 1.0, -1.0, 0.0)
ENDS = [3, 6, 8, 14]
POSITIONS_N = torch.cat([torch.arange(length) for length in LENGTHS]).int()


def case() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(outputs of the head, labels, columns) of two pairs and padding."""
    n = len(POSITIONS_N)
    labels_N = torch.full((n,), -100)
    labels_N[ENDS] = 0
    sides_N = torch.cat([torch.full((length,), side) for length, side in zip(LENGTHS, SIDES, strict=True)])
    logits_NV = torch.randn(n, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return logits_NV, labels_N, {PREFERRED: sides_N}


@pytest.mark.parametrize("options", [RewardOptions(), RewardOptions(margin=0.5, centre=0.1)])
def test_loss_and_gradient_are_those_of_plain_autograd(options: RewardOptions) -> None:
    logits_NV, labels_N, columns = case()
    expected, own = (logits_NV.clone().requires_grad_() for _ in range(2))
    scores = expected[ENDS, 0]
    wanted = sum(
        -torch.nn.functional.logsigmoid(w - r - options.margin) + options.centre * (w + r) ** 2
        for w, r in (scores[:2], scores[2:])
    )
    found = sequence_loss(options, token_loss(own.float(), labels_N, columns), POSITIONS_N, columns)
    assert found.shape == ()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(found, [own])
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, [expected])[0], rtol=1e-5, atol=1e-7)
    assert sorted(gradient[:, 0].nonzero()[:, 0].tolist()) == ENDS


def test_numbers_by_hand() -> None:
    """Scores 2 and 1, then 0 and 1."""
    _, labels_N, columns = case()
    logits_NV = torch.zeros(len(labels_N), 1)
    logits_NV[ENDS, 0] = torch.tensor([2.0, 1.0, 0.0, 1.0])
    scores_N = token_loss(logits_NV, labels_N, columns)
    found = sequence_loss(RewardOptions(), scores_N, POSITIONS_N, columns).item()
    assert found == pytest.approx(math.log(1 + math.exp(-1)) + math.log(1 + math.exp(1)))
    centred = sequence_loss(RewardOptions(centre=0.01), scores_N, POSITIONS_N, columns).item()
    assert centred == pytest.approx(found + 0.01 * (9 + 1))


def test_equal_scores_lose_log_2_a_pair() -> None:
    _, labels_N, columns = case()
    scores_N = token_loss(torch.ones(len(labels_N), 1), labels_N, columns)
    assert sequence_loss(RewardOptions(), scores_N, POSITIONS_N, columns).item() == pytest.approx(2 * math.log(2))
