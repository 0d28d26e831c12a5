"""Policy losses that break a rule are found by the check that is about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from surogate_core.plugin import PluginError, bundles
from surogate_testing import policy_losses


def clipped(terms: bundles.PolicyTerms) -> torch.Tensor:
    bounded_N = terms.ratio_N.clamp(1 - terms.low, 1 + terms.high)
    return -(terms.ratio_N * terms.advantages_N).minimum(bounded_N * terms.advantages_N)


def overwriting(terms: bundles.PolicyTerms) -> torch.Tensor:
    loss_N = clipped(terms)
    terms.advantages_N.zero_()
    return loss_N


def counting() -> Callable[[bundles.PolicyTerms], torch.Tensor]:
    calls = iter(range(100))
    return lambda terms: clipped(terms) * (1 + next(calls))


def spec(**parts: Any) -> bundles.PolicyLossSpec:
    return bundles.PolicyLossSpec(name="odd", build=lambda options: bundles.PolicyLoss(**{"loss": clipped, **parts}))


def averaged(weights: Any, divisor: Any = lambda lengths: 1.0) -> bundles.Aggregation:
    return bundles.Aggregation(weights=weights, divisor=divisor)


WRONG = [
    ({"loss": lambda t: -t.advantages_N * (t.log_ratio_N * 5).exp()}, "gives_a_loss_for_each_token", "inf"),
    ({"loss": lambda t: -clipped(t)}, "makes_rewarded_completions_more_probable", "for the advantage -1"),
    ({"loss": lambda t: clipped(t) - clipped(t).mean()}, "does_not_look_at_other_completions", "beside another"),
    ({"loss": overwriting}, "is_pure", "writes into advantages_N"),
    ({"loss": counting()}, "is_pure", "another loss the second time"),
    ({"aggregation": averaged(lambda n: [1.0])}, "weighs_every_completion", r"weights \[1.0\] .* for 2 documents"),
    ({"aggregation": averaged(lambda n: [0.0] * len(n.trained))}, "weighs_every_completion", "a weight above 0"),
    ({"aggregation": averaged(lambda n: n.trained, lambda n: 0.0)}, "weighs_every_completion", "trained tokens is 0.0"),
    (
        {"aggregation": averaged(lambda n: n.lengths)},
        "weighs_every_completion",
        "its aggregation failed: Attr",
    ),
    ({"figures": {"odd": lambda t: t.logp_N * float("nan")}}, "reports_its_figures", "odd is not finite"),
    ({"figures": {"odd": lambda t: t.logp_N.mean()}}, "reports_its_figures", r"its figure odd has the shape \[\]"),
    ({"figures": {"kl": lambda t: t.logp_N}}, "reports_its_figures", "every policy loss has the figure kl"),
]


@pytest.mark.parametrize(("parts", "check", "message"), WRONG)
def test_what_breaks_a_rule_is_found(parts: dict[str, Any], check: str, message: str) -> None:
    with pytest.raises((AssertionError, PluginError), match=message):
        getattr(policy_losses, check)(spec(**parts))


def test_a_sound_one_passes_these() -> None:
    for ratio in ("token", "mean", "product"):
        for check in policy_losses.CHECKS:
            if check is not policy_losses.trains:
                check(spec(ratio=ratio))


def test_a_loss_that_reads_a_value_cannot_be_traced() -> None:
    def branching(terms: bundles.PolicyTerms) -> torch.Tensor:
        return clipped(terms) if float(terms.ratio_N.max()) < 100 else clipped(terms) * 0.5

    with pytest.raises(PluginError, match="policy loss odd failed"):
        policy_losses.trains(spec(loss=branching))


def test_terms_by_hand_have_the_ratios_and_the_log_probabilities_that_are_given() -> None:
    ratio_N, advantages_N = torch.tensor([1.0, 1.5, 0.5]), torch.ones(3)
    logp_N = torch.tensor([-2.0, -0.5, -3.0], requires_grad=True)
    given = policy_losses.terms_of(ratio_N=ratio_N, advantages_N=advantages_N, logp_N=logp_N)
    assert torch.equal(given.ratio_N, ratio_N)
    torch.testing.assert_close((given.logp_N - given.old_N).exp(), ratio_N)
    (gradient_N,) = torch.autograd.grad(given.ratio_N.sum(), [logp_N])
    torch.testing.assert_close(gradient_N, ratio_N)
    usual = policy_losses.terms_of(ratio_N=ratio_N, advantages_N=advantages_N)
    assert usual.logp_N.tolist() == [-1.0] * 3
