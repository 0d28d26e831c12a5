"""The policy losses that this plugin offers.

ρ is `PolicyTerms.ratio_N`, A the advantage. The gradients are those of the published losses of completions; the value
of rloo's is theirs times the length. Shape suffix: N tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import bundles

if TYPE_CHECKING:
    from torch import Tensor

DPPO_PENALTY = 1e-3
"""Coefficient of the squared log ratio in dppo, as in prime-rl."""


def clipped_ratio(terms: bundles.PolicyTerms) -> Tensor:
    """-min(ρ A, clip(ρ, 1 - low, 1 + high) A)."""
    clipped_N = terms.ratio_N.clamp(1 - terms.low, 1 + terms.high)
    return -(terms.ratio_N * terms.advantages_N).minimum(clipped_N * terms.advantages_N)


def out_of_bounds(terms: bundles.PolicyTerms) -> tuple[Tensor, Tensor]:
    """Where `clipped_ratio` has no gradient."""
    return terms.clipped(1 - terms.low, 1 + terms.high)


def weighted_logp(terms: bundles.PolicyTerms) -> Tensor:
    """-sg(min(ρ, high)) · A · log π, where sg(x) is x without gradient."""
    return -terms.ratio_N.clamp(max=terms.high).detach() * terms.advantages_N * terms.logp_N


def above_bound(terms: bundles.PolicyTerms) -> tuple[Tensor, Tensor]:
    """Where `weighted_logp` cuts the ratio."""
    return terms.clipped(0.0, terms.high)


def masked_ratio(terms: bundles.PolicyTerms) -> Tensor:
    """-ρ A + 0.001 · log²(ρ), without the first term where `moved_too_far`; ρ is π / μ."""
    fallen_N, risen_N = moved_too_far(terms)
    policy_N = (-terms.ratio_N * terms.advantages_N).masked_fill(fallen_N | risen_N, 0.0)
    return policy_N + DPPO_PENALTY * terms.log_ratio_N.square()


def moved_too_far(terms: bundles.PolicyTerms) -> tuple[Tensor, Tensor]:
    """Where A < 0 and π - μ < -low, and where A > 0 and π - μ > high."""
    change_N, advantages_N = terms.logp_N.detach().exp() - terms.behaviour_N.exp(), terms.advantages_N
    return (advantages_N < 0) & (change_N < -terms.low), (advantages_N > 0) & (change_N > terms.high)


GRPO = bundles.PolicyLoss(loss=clipped_ratio, clipped=out_of_bounds, aggregation=bundles.PER_COMPLETION)
DAPO = bundles.PolicyLoss(loss=clipped_ratio, clipped=out_of_bounds, bounds=(0.2, 0.28))
DR_GRPO = bundles.PolicyLoss(loss=clipped_ratio, clipped=out_of_bounds, aggregation=bundles.PER_LARGEST_LENGTH)
BNPO = bundles.PolicyLoss(loss=clipped_ratio, clipped=out_of_bounds, aggregation=bundles.PER_MICRO_BATCH)
GSPO = bundles.PolicyLoss(
    loss=clipped_ratio, ratio="mean", clipped=out_of_bounds, bounds=(3e-4, 4e-4), aggregation=bundles.PER_COMPLETION
)
RLOO = bundles.PolicyLoss(
    loss=clipped_ratio, ratio="product", clipped=out_of_bounds, kl="reward", aggregation=bundles.SUM_PER_COMPLETION
)
CISPO = bundles.PolicyLoss(loss=weighted_logp, clipped=above_bound, bounds=(None, 5.0))
"""The upper bound is the largest ratio, as in TRL."""
DPPO = bundles.PolicyLoss(loss=masked_ratio, against="behaviour", clipped=moved_too_far, corrected=False)
"""Both bounds are differences of probabilities."""

POLICY_LOSSES = (
    bundles.PolicyLossSpec(name="dapo", build=lambda options: DAPO),  # arXiv:2503.14476
    bundles.PolicyLossSpec(name="grpo", build=lambda options: GRPO),  # arXiv:2402.03300
    bundles.PolicyLossSpec(name="dr_grpo", build=lambda options: DR_GRPO, advantage="mean"),  # arXiv:2503.20783
    bundles.PolicyLossSpec(name="bnpo", build=lambda options: BNPO),  # TRL
    bundles.PolicyLossSpec(name="gspo", build=lambda options: GSPO),  # arXiv:2507.18071
    bundles.PolicyLossSpec(name="cispo", build=lambda options: CISPO),  # arXiv:2506.13585
    bundles.PolicyLossSpec(name="rloo", build=lambda options: RLOO, advantage="rloo"),  # arXiv:2402.14740
    bundles.PolicyLossSpec(name="dppo", build=lambda options: DPPO, advantage="mean"),  # prime-rl
)
