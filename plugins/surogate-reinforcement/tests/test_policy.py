"""When a policy loss needs whole completions, and which settings multiply it."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_core.plugin import PluginError, bundles
from surogate_reinforcement.policy import Policy
from surogate_reinforcement.policy_terms import bounds
from surogate_testing.policy_losses import LossSettings


def policy(parts: dict[str, Any], **settings: Any) -> Policy:
    spec = bundles.PolicyLossSpec(
        name="mine", build=lambda options: bundles.PolicyLoss(loss=lambda terms: -terms.ratio_N, **parts)
    )
    return Policy(bundles.part_of("policy_loss", spec), LossSettings(**settings))


BEHAVIOUR = {"against": "behaviour", "corrected": False}
WHOLE = [
    ({}, {}, False),
    ({}, {"num_iterations": 2}, False),
    ({}, {"importance_correction": "sequence"}, True),
    ({"corrected": False}, {"importance_correction": "sequence"}, False),
    # At the first and only iteration every ratio to the old policy is 1, and none to the rollout engine need be.
    ({"ratio": "mean"}, {}, False),
    ({"ratio": "mean"}, {"num_iterations": 2}, True),
    ({"ratio": "product"} | BEHAVIOUR, {}, True),
    (BEHAVIOUR, {"num_iterations": 2, "importance_correction": "sequence"}, False),
    ({"sums_completions": True}, {}, True),
]


@pytest.mark.parametrize(("parts", "settings", "whole"), WHOLE)
def test_the_head_runs_twice_where_sums_over_completions_are_needed(
    parts: dict[str, Any], settings: dict[str, Any], whole: bool
) -> None:
    found = policy(parts, **settings)
    assert found.by_sequence == whole
    assert (found.objective().sequence_loss is not None) == whole


def test_the_objective_says_whose_it_is() -> None:
    spec = bundles.PolicyLossSpec(
        name="mine", build=lambda options: bundles.PolicyLoss(loss=lambda terms: -terms.ratio_N)
    )
    objective = Policy(bundles.part_of("policy_loss", spec, plugin="plugin x"), LossSettings()).objective()
    assert (objective.name, objective.label) == ("mine", "policy loss mine of plugin x")


def test_figures_follow_the_parts() -> None:
    def figures(parts: dict[str, Any], **settings: Any) -> set[str]:
        always = {"entropy", "logprob_gap/mean", "logprob_gap/max"}
        return set(policy(parts, **settings).objective().figures) - always

    def clipped(terms: Any) -> Any:
        return terms.clipped(0.8, 1.2)

    importance = {"importance/mean", "importance/truncated"}
    shares = {"clip_ratio/low", "clip_ratio/high", "clip_ratio/region"}
    assert figures({}) == importance
    assert figures({"clipped": clipped}) == importance, "every ratio is 1"
    assert figures({"clipped": clipped}, num_iterations=2) == importance | shares
    assert figures({"clipped": clipped} | BEHAVIOUR) == shares
    own = {"figures": {"mine/moved": lambda terms: terms.log_ratio_N}}
    assert figures(own, importance_correction="none") == {"mine/moved"}
    assert figures(own | {"sums_completions": True}, importance_correction="none") == {"completions", "mine/moved"}


def test_bounds() -> None:
    def found(own: tuple[float | None, float], **settings: Any) -> tuple[float, float]:
        one = policy({"bounds": own}, **settings)
        return bounds(one.loss, one.settings)

    assert found((0.1, 0.3)) == (0.1, 0.3)
    assert found((0.1, 0.3), epsilon=0.2) == (0.2, 0.2)
    assert found((0.1, 0.3), epsilon=0.2, epsilon_high=0.4) == (0.2, 0.4)
    assert found((None, 5.0), epsilon=0.2) == (0.0, 5.0)
    assert found((None, 5.0), epsilon_high=3.0) == (0.0, 3.0)


def test_the_divergence_is_where_the_loss_says() -> None:
    values = [-1.0, -2.0], [-1.5, -1.0], [True, True]
    assert policy({"kl": "reward"}, beta=0.1).kl_penalty(*values) == pytest.approx(-0.05)
    assert policy({"kl": "loss"}, beta=0.1).kl_penalty(*values) == 0
    assert "reference_logprobs" in policy({}, beta=0.1).columns
    assert "reference_logprobs" not in policy({}).columns


def test_what_is_no_policy_loss_is_refused() -> None:
    with pytest.raises(PluginError, match=r"policy loss mine: `build` returned 'grpo', not a PolicyLoss"):
        Policy(
            bundles.part_of("policy_loss", bundles.PolicyLossSpec(name="mine", build=lambda options: "grpo")),
            LossSettings(),
        )  # type: ignore[arg-type,return-value]
