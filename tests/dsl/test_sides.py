"""The side outputs of a layer with experts, and their gradients.

Shape suffixes: N tokens, E experts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.dsl.experts import Routes
from surogate_core.dsl.sides import MASS, PROBABILITY, TOKENS, Z, router_figures

N, E, CHOICES = 11, 5, 2


def logits() -> Tensor:
    return torch.randn(N, E, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("used", [N, 7, 0])
def test_sums_are_those_of_the_tokens_without_padding(used: int, sigmoid: bool) -> None:
    def probabilities(logits_NE: Tensor) -> Tensor:
        scores_NE = logits_NE.sigmoid()
        return scores_NE / scores_NE.sum(-1, keepdim=True) if sigmoid else torch.softmax(logits_NE, -1)

    logits_NE = logits()
    routes = Routes.of(logits_NE, CHOICES, renormalise=True)
    sides = router_figures(logits_NE, routes, {"real": torch.arange(N) < used}, sigmoid=sigmoid)
    chosen = routes.experts_NK[:used].flatten().tolist()
    assert sides[TOKENS].tolist() == [chosen.count(e) for e in range(E)]
    real_NE = logits_NE[:used]
    expected_E = probabilities(real_NE).sum(0)
    z = torch.logsumexp(real_NE, -1).square().sum()
    torch.testing.assert_close(sides[PROBABILITY], expected_E)
    torch.testing.assert_close(sides[Z], z)
    torch.testing.assert_close(sides[MASS], probabilities(real_NE).topk(CHOICES).values.sum())
    assert not sides[MASS].requires_grad
    factors_E = torch.arange(1.0, E + 1, dtype=torch.float64)
    (found,) = torch.autograd.grad((sides[PROBABILITY] * factors_E).sum() + 0.5 * sides[Z], logits_NE)
    (wanted,) = torch.autograd.grad((expected_E * factors_E).sum() + 0.5 * z, logits_NE)
    torch.testing.assert_close(found, wanted)


def test_without_the_table_every_position_counts() -> None:
    logits_NE = torch.zeros(N, E)
    routes = Routes.of(logits_NE, CHOICES, renormalise=True)
    sides = router_figures(logits_NE, routes, {})
    assert sides[TOKENS].tolist() == [N, N, 0, 0, 0], "of equal probabilities the lowest numbers win"
    torch.testing.assert_close(sides[PROBABILITY], torch.full((E,), N / E))
