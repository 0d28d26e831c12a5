"""Losses and gradients equal plain autograd in float64, and numbers computed by hand.

Shape suffixes: N tokens of a micro-batch, B completions, T their tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from surogate_task_grpo.options import GRPOOptions, advantage_name
from surogate_task_grpo.policy_losses import POLICY_LOSSES
from torch import Tensor

from surogate_core.plugin import IGNORE_LABEL, bundles
from surogate_reinforcement.policy import Policy
from surogate_reinforcement.policy_terms import bounds
from surogate_testing import tiny
from surogate_testing.suites import bundle_checks

SPECS = {spec.name: spec for spec in POLICY_LOSSES}
TYPES = tuple(SPECS)
LENGTHS = (3, 1, 5, 2)
ADVANTAGES = (1.5, -0.5, -2.0, 0.75)
PROMPT = 2
V = 7


def policy(options: GRPOOptions) -> Policy:
    return Policy(bundles.part_of("policy_loss", SPECS[options.loss_type]), options)


@dataclass(frozen=True)
class Case:
    """Completions as padded rows, the layout of TRL, in which the reference computes."""

    logits_BTV: Tensor
    tokens_BT: Tensor
    mask_BT: Tensor
    advantages_B1: Tensor
    behaviour_BT: Tensor
    old_BT: Tensor
    reference_BT: Tensor


def made(options: GRPOOptions) -> Case:
    generator = torch.Generator().manual_seed(1)
    b, t = len(LENGTHS), max(LENGTHS)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits_BTV = 1.5 * drawn(b, t, V)
    tokens_BT = torch.randint(0, V, (b, t), generator=generator)
    mask_BT = (torch.arange(t)[None] < torch.tensor(LENGTHS)[:, None]).double()
    logp_BT = chosen(logits_BTV, tokens_BT, options)
    old_BT = logp_BT + 0.3 * drawn(b, t) if options.num_iterations > 1 else logp_BT
    return Case(
        logits_BTV=logits_BTV,
        tokens_BT=tokens_BT,
        mask_BT=mask_BT,
        advantages_B1=torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None],
        behaviour_BT=old_BT + 0.3 * drawn(b, t),
        old_BT=old_BT,
        reference_BT=logp_BT + 0.5 * drawn(b, t),
    )


def chosen(logits_BTV: Tensor, tokens_BT: Tensor, options: GRPOOptions) -> Tensor:
    return (logits_BTV / options.temperature).log_softmax(-1).gather(2, tokens_BT[..., None])[..., 0]


def reference_loss(case: Case, logits_BTV: Tensor, options: GRPOOptions) -> Tensor:
    """The loss of a step, from the papers' formulas on padded rows."""
    low, high = bounds(policy(options).loss, options)
    kind, a, mask = options.loss_type, case.advantages_B1, case.mask_BT
    logp = chosen(logits_BTV, case.tokens_BT, options)
    old = case.old_BT if options.num_iterations > 1 else logp.detach()
    lengths_B1 = mask.sum(1, keepdim=True)
    log_ratio = logp - old
    if kind in ("gspo", "rloo"):
        log_ratio = (log_ratio * mask).sum(1, keepdim=True) / (lengths_B1 if kind == "gspo" else 1)
    ratio = log_ratio.exp().expand_as(logp)
    if kind == "cispo":
        loss = -ratio.clip(max=high).detach() * a * logp
    elif kind == "dppo":
        ratio, change = (logp - case.behaviour_BT).exp(), (logp.exp() - case.behaviour_BT.exp()).detach()
        kept = ~(((a > 0) & (change > high)) | ((a < 0) & (change < -low)))
        loss = -a * ratio * kept + 1e-3 * (logp - case.behaviour_BT) ** 2
    else:
        loss = -torch.minimum(ratio * a, ratio.clip(1 - low, 1 + high) * a)
    if kind != "dppo" and options.importance_correction != "none":
        gap = (old - case.behaviour_BT).detach()
        gap = (gap * mask).sum(1, keepdim=True) if options.importance_correction == "sequence" else gap
        loss = loss * gap.exp().clip(max=options.importance_clip)
    if options.beta and kind != "rloo":
        difference = logp - case.reference_BT
        k3 = torch.exp(case.reference_BT - logp) - (case.reference_BT - logp) - 1
        k3 = k3 * torch.exp(logp - old)
        loss = loss + options.beta * (k3 if options.kl_estimator == "k3" else difference**2 / 2)
    if kind in ("grpo", "gspo", "rloo"):
        return ((loss * mask).sum(1) / lengths_B1[:, 0]).mean()
    if kind == "dr_grpo":
        return (loss * mask).sum() / (len(LENGTHS) * options.max_completion_length)
    return (loss * mask).sum() / mask.sum()


def packed_loss(
    case: Case, logits_BTV: Tensor, options: GRPOOptions, batches: Sequence[Sequence[int]] = ((0, 1, 2, 3),)
) -> Tensor:
    """The same as the engine computes it: completions behind their prompts, one after another in micro-batches."""
    divided = policy(options).aggregation([[LENGTHS[b] for b in batch] for batch in batches], len(LENGTHS))
    total, divisor = torch.zeros((), dtype=torch.float64), 0.0
    for batch, one in zip(batches, divided, strict=True):
        arguments = micro_batch(case, logits_BTV, options, batch, one.weights)
        total = total + engine_loss(policy(options).objective(), *arguments)
        divisor += one.divisor
    return total / divisor


def micro_batch(
    case: Case, logits_BTV: Tensor, options: GRPOOptions, batch: Sequence[int], weights: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(logits_NV, labels_N, positions_N, columns) with PROMPT tokens before and one behind each completion."""
    named = {
        "advantages": case.advantages_B1.expand_as(case.mask_BT),
        "behaviour_logprobs": case.behaviour_BT,
        "old_logprobs": case.old_BT,
        "reference_logprobs": case.reference_BT,
    }
    parts: dict[str, list[Tensor]] = {name: [] for name in ("logits", "labels", "positions", "weights", *named)}
    # Padding before the first completion and behind the last, as documents of their own.
    zeros = [torch.zeros(3, dtype=torch.float64)]
    padding = dict.fromkeys(parts, zeros) | {
        "logits": [torch.zeros(3, V, dtype=torch.float64)],
        "labels": [torch.full((3,), IGNORE_LABEL)],
        "positions": [torch.arange(3, dtype=torch.int32)],
    }
    for b, weight in zip(batch, weights, strict=True):
        n = LENGTHS[b]
        around = (PROMPT, 1)
        parts["logits"].append(torch.nn.functional.pad(logits_BTV[b, :n], (0, 0, *around), value=0.5))
        parts["labels"].append(torch.nn.functional.pad(case.tokens_BT[b, :n], around, value=IGNORE_LABEL))
        parts["positions"].append(torch.arange(PROMPT + n + 1, dtype=torch.int32))
        values = {name: value[b, :n] for name, value in named.items()}
        values["weights"] = torch.full((n,), weight, dtype=torch.float64)
        for name, value in values.items():
            parts[name].append(torch.nn.functional.pad(value, around))
    whole = {name: torch.cat([*padding[name], *part, *padding[name]]) for name, part in parts.items()}
    wanted = {name: whole[name] for name in (*policy(options).columns, "weights")}
    return whole["logits"], whole["labels"], whole["positions"], wanted


def engine_loss(
    made: bundles.Objective, logits_NV: Tensor, labels_N: Tensor, positions_N: Tensor, values: dict[str, Tensor]
) -> Tensor:
    loss_N = made.token_loss(logits_NV, labels_N, values)
    assert not loss_N[labels_N == IGNORE_LABEL].any()
    if made.sequence_loss is None:
        return (loss_N * values["weights"]).sum()
    return made.sequence_loss(loss_N, positions_N, values)


def both(options: GRPOOptions) -> list[tuple[Tensor, Tensor]]:
    """(loss, gradient by the logits) of the objective and of the reference."""
    case, found = made(options), []
    for function in (packed_loss, reference_loss):
        leaf = case.logits_BTV.clone().requires_grad_()
        loss = function(case, leaf, options)
        found.append((loss.detach(), torch.autograd.grad(loss, [leaf])[0]))
    return found


def agree(options: GRPOOptions) -> None:
    (loss, gradient), (expected, expected_gradient) = both(options)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-13)
    if options.loss_type != "rloo":  # its value is per token, see losses.py
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", TYPES)
def test_equals_plain_autograd(kind: str) -> None:
    for iterations in (1, 2):
        for correction in ("token", "sequence", "none"):
            if kind not in ("gspo", "rloo") or correction != "token":
                agree(GRPOOptions(loss_type=kind, num_iterations=iterations, importance_correction=correction))


@pytest.mark.parametrize("kind", ["gspo", "rloo"])
def test_each_token_of_a_completions_ratio_has_its_own_importance_weight(kind: str) -> None:
    """The gradient by a token's logits is that without weights, times the token's."""
    for iterations in (1, 2):
        gradients = []
        for correction in ("token", "none"):
            options = GRPOOptions(loss_type=kind, num_iterations=iterations, importance_correction=correction)
            gradients.append(both(options)[0][1])
        case = made(options)
        weights_BT = (case.old_BT - case.behaviour_BT).exp().clip(max=options.importance_clip) * case.mask_BT
        torch.testing.assert_close(gradients[0], gradients[1] * weights_BT[..., None], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", TYPES)
def test_with_divergence_temperature_and_bounds(kind: str) -> None:
    for estimator in ("k2", "k3"):
        options = GRPOOptions(
            loss_type=kind,
            num_iterations=2,
            beta=0.3,
            kl_estimator=estimator,
            temperature=0.7,
            importance_correction="sequence" if kind in ("gspo", "rloo") else "token",
            epsilon=0.1,
            epsilon_high=1.15 if kind == "cispo" else 0.15,
            importance_clip=1.1,
            max_completion_length=9,
        )
        agree(options)


def test_the_cases_reach_every_branch() -> None:
    """Some ratios are clipped below and above, some are not; some importance weights are cut; some dppo terms drop."""
    case = made(options := GRPOOptions(num_iterations=2))
    logp, kept = chosen(case.logits_BTV, case.tokens_BT, options), case.mask_BT.bool()
    ratio, a = (logp - case.old_BT).exp(), case.advantages_B1.expand_as(logp)
    assert (kept & (a > 0) & (ratio > 1.28)).any()
    assert (kept & (a < 0) & (ratio < 0.8)).any()
    assert (kept & (ratio > 0.8) & (ratio < 1.28)).any()
    assert (kept & ((case.old_BT - case.behaviour_BT).exp() > 1.1)).any()
    assert (kept & ((case.old_BT - case.behaviour_BT).exp() < 1.1)).any()


def test_all_estimators_have_the_gradient_of_k2() -> None:
    """With one iteration. Plain k1 has none on average, plain k3 another; the value of k1 is the plain difference."""
    first, second, third = (GRPOOptions(beta=0.5, kl_estimator=name) for name in ("k1", "k2", "k3"))
    (loss, gradient), _ = both(first)
    (other, same), _ = both(second)
    torch.testing.assert_close(gradient, same, rtol=1e-12, atol=0)
    torch.testing.assert_close(both(third)[0][1], same, rtol=1e-10, atol=1e-13)
    case = made(first)
    difference_BT = (chosen(case.logits_BTV, case.tokens_BT, first) - case.reference_BT) * case.mask_BT
    extra = 0.5 * (difference_BT - difference_BT**2 / 2).sum() / case.mask_BT.sum()
    torch.testing.assert_close(loss - other, extra)


@pytest.mark.parametrize("kind", TYPES)
def test_the_first_gradient_is_the_policy_gradient(kind: str) -> None:
    """With one iteration and an exact engine it is that of -A log π, averaged as the loss type says."""
    options = GRPOOptions(loss_type=kind, max_completion_length=9)
    case = made(options)
    case = replace(case, behaviour_BT=case.old_BT)
    leaf = case.logits_BTV.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(packed_loss(case, leaf, options), [leaf])
    logp = chosen(leaf, case.tokens_BT, options)
    per_token = -case.advantages_B1 * logp * case.mask_BT
    expected = {
        "grpo": (per_token.sum(1) / case.mask_BT.sum(1)).mean(),
        "gspo": (per_token.sum(1) / case.mask_BT.sum(1)).mean(),
        "rloo": per_token.sum(1).mean(),
        "dr_grpo": per_token.sum() / (4 * 9),
    }.get(kind, per_token.sum() / case.mask_BT.sum())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, [leaf])[0], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", [k for k in TYPES if k != "bnpo"])
def test_packing_does_not_matter(kind: str) -> None:
    for correction in ("token", "sequence"):
        options = GRPOOptions(loss_type=kind, num_iterations=2, importance_correction=correction)
        case = made(options)
        whole = packed_loss(case, case.logits_BTV, options)
        for batches in ([[2], [0, 1], [3]], [[3, 2, 1, 0]], [[0], [], [1, 2, 3]]):
            torch.testing.assert_close(packed_loss(case, case.logits_BTV, options, batches), whole)


def test_bnpo_averages_micro_batches() -> None:
    options = GRPOOptions(loss_type="bnpo", num_iterations=2)
    case = made(options)
    halves = []
    for rows in ([0, 1], [2, 3]):
        part = Case(**{name: value[rows] for name, value in vars(case).items()})
        halves.append(reference_loss(part, part.logits_BTV, options))
    found = packed_loss(case, case.logits_BTV, options, [[0, 1], [2, 3]])
    torch.testing.assert_close(found, sum(halves) / 2)


def by_hand(options: GRPOOptions, probabilities: Sequence[float], advantage: float, **others: Sequence[float]) -> float:
    """The loss of one completion; `others` are probabilities too."""
    p_N = torch.tensor(probabilities, dtype=torch.float64)
    n = len(probabilities)
    values = {name: torch.tensor(column, dtype=torch.float64).log() for name, column in others.items()}
    values |= {"advantages": torch.full((n,), advantage, dtype=torch.float64)}
    values.setdefault("behaviour_logprobs", p_N.log())
    (one,) = policy(options).aggregation([[n]], 1)
    values["weights"] = torch.full((n,), one.weights[0], dtype=torch.float64)
    arguments = (torch.stack((p_N, 1 - p_N), 1).log(), torch.zeros(n, dtype=torch.int64), torch.arange(n), values)
    return (engine_loss(policy(options).objective(), *arguments) / one.divisor).item()


def test_values_by_hand() -> None:
    """Two tokens; ratios .6/.5 = 1.2 and .2/.4 = .5, whose product is .6 and whose geometric mean is sqrt(.6)."""
    p, old = [0.6, 0.2], {"old_logprobs": [0.5, 0.4], "behaviour_logprobs": [0.5, 0.4]}

    def loss(kind: str, advantage: float, **changes: object) -> float:
        options = GRPOOptions(loss_type=kind, num_iterations=2, **changes)
        return by_hand(options, p, advantage, **old)

    # A = 1: min(1.2, 1.2) and min(.5, .8); A = -1: max(1.2, 1.2) and max(.5, .8).
    assert loss("grpo", 1.0) == pytest.approx(-(1.2 + 0.5) / 2)
    assert loss("grpo", -1.0) == pytest.approx((1.2 + 0.8) / 2)
    assert loss("grpo", 1.0, epsilon=0.1) == pytest.approx(-(1.1 + 0.5) / 2)
    assert loss("dapo", 1.0, epsilon_high=0.15) == pytest.approx(-(1.15 + 0.5) / 2)
    assert loss("bnpo", -1.0) == pytest.approx((1.2 + 0.8) / 2)
    assert loss("dr_grpo", 1.0, max_completion_length=10) == pytest.approx(-1.7 / 10)
    assert loss("gspo", 1.0) == pytest.approx(-math.sqrt(0.6))
    assert loss("gspo", -1.0) == pytest.approx(1 - 3e-4)
    assert loss("rloo", 2.0) == pytest.approx(2 * -2 * 0.6)  # of two tokens
    assert loss("rloo", -1.0) == pytest.approx(2 * 0.8)
    assert loss("cispo", 1.0) == pytest.approx(-(1.2 * math.log(0.6) + 0.5 * math.log(0.2)) / 2)
    assert loss("cispo", 1.0, epsilon_high=1.1) == pytest.approx(-(1.1 * math.log(0.6) + 0.5 * math.log(0.2)) / 2)
    # dppo: probabilities rise by .1 and fall by .2; the penalty is 1e-3 of the squared log ratios.
    penalty = 1e-3 * (math.log(1.2) ** 2 + math.log(0.5) ** 2) / 2
    assert loss("dppo", 1.0) == pytest.approx(-(1.2 + 0.5) / 2 + penalty)
    assert loss("dppo", 1.0, epsilon_high=0.05) == pytest.approx(-0.5 / 2 + penalty)
    assert loss("dppo", -1.0, epsilon=0.15) == pytest.approx(1.2 / 2 + penalty)


def test_divergence_by_hand() -> None:
    """log(.6 / .3) = log 2 at one token: k1 = log 2, k2 = log² 2 / 2, k3 = 1/2 - 1 + log 2."""
    expected = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": math.log(2) - 0.5}
    for name, value in expected.items():
        options = GRPOOptions(beta=0.1, kl_estimator=name)
        assert by_hand(options, [0.6], 0.0, reference_logprobs=[0.3]) == pytest.approx(0.1 * value)


def test_importance_weights_by_hand() -> None:
    """The model has .6 and .2, the engine had .5 and .4: weights 1.2 and .5, of the completion .6; cut at 1.1."""
    for correction, weights in {"token": [1.1, 0.5], "sequence": [0.6, 0.6], "none": [1, 1]}.items():
        options = GRPOOptions(importance_correction=correction, importance_clip=1.1)
        found = by_hand(options, [0.6, 0.2], 1.0, behaviour_logprobs=[0.5, 0.4])
        assert found == pytest.approx(-sum(weights) / 2)


@pytest.mark.parametrize("kind", TYPES)
def test_a_missing_behaviour_logprob_counts_as_the_trainers(kind: str) -> None:
    for iterations, correction in ((1, "token"), (2, "token"), (1, "sequence")):
        options = GRPOOptions(loss_type=kind, num_iterations=iterations, importance_correction=correction)
        case = made(options)
        found = []
        for value in (case.old_BT[2, 1].item(), math.nan, -math.inf):
            behaviour_BT = case.behaviour_BT.clone()
            behaviour_BT[2, 1] = value
            leaf = case.logits_BTV.clone().requires_grad_()
            loss = packed_loss(replace(case, behaviour_BT=behaviour_BT), leaf, options)
            found.append(torch.autograd.grad(loss, [leaf])[0])
        assert found[0].isfinite().all()
        for other in found[1:]:
            torch.testing.assert_close(other, found[0])


def test_weights_and_divisors() -> None:
    """Two micro-batches with three completions of 4, 2 and 6 tokens, and one completion that is left out."""
    expected = {
        "dapo": ([(1, 1), (1,)], 12),
        "cispo": ([(1, 1), (1,)], 12),
        "dppo": ([(1, 1), (1,)], 12),
        "grpo": ([(1 / 4, 1 / 2), (1 / 6,)], 4),
        "gspo": ([(1 / 4, 1 / 2), (1 / 6,)], 4),
        "rloo": ([(1, 1), (1,)], 4),
        "dr_grpo": ([(1, 1), (1,)], 4 * 100),
        "bnpo": ([(1 / 6, 1 / 6), (1 / 6,)], 2),
    }
    assert set(expected) == set(TYPES)
    for kind, (weights, divisor) in expected.items():
        found = policy(GRPOOptions(loss_type=kind, max_completion_length=100)).aggregation([[4, 2], [6]], 4)
        assert ([one.weights for one in found], sum(one.divisor for one in found)) == (weights, divisor)


def test_bounds_follow_the_options() -> None:
    def found(kind: str, **changes: Any) -> tuple[float, float]:
        options = GRPOOptions(loss_type=kind, **changes)
        return bounds(policy(options).loss, options)

    assert found("dapo") == (0.2, 0.28)
    assert found("dapo", epsilon=0.1) == (0.1, 0.1)
    assert found("dapo", epsilon_high=0.4) == (0.2, 0.4)
    assert found("gspo") == (3e-4, 4e-4)
    assert found("cispo", epsilon=0.1) == (0.0, 5.0), "it has no lower bound"
    assert found("cispo", epsilon_high=3.0) == (0.0, 3.0)


def test_advantages_follow_the_loss_type() -> None:
    names = {kind: advantage_name(GRPOOptions(loss_type=kind), spec) for kind, spec in SPECS.items()}
    others = {"dr_grpo": "mean", "dppo": "mean", "rloo": "rloo"}
    assert names == dict.fromkeys(TYPES, "group") | others
    for kind, spec in SPECS.items():
        assert advantage_name(GRPOOptions(loss_type=kind, scale_rewards="none"), spec) == "mean"
        assert advantage_name(GRPOOptions(loss_type=kind, scale_rewards="none", advantage="opo"), spec) == "opo"


def test_rloo_pays_the_divergence_in_the_reward() -> None:
    behaviour, reference, trained = [-1.0, -2.0, -9.0], [-1.5, -1.0, 0.0], [True, True, False]

    def penalty(kind: str, **changes: Any) -> float:
        return policy(GRPOOptions(loss_type=kind, **changes)).kl_penalty(behaviour, reference, trained)

    assert penalty("rloo", beta=0.1) == pytest.approx(-0.05)
    assert penalty("rloo") == 0
    assert penalty("grpo", beta=0.1) == 0
    assert "reference_logprobs" in policy(GRPOOptions(loss_type="rloo", beta=0.1)).columns


@pytest.mark.parametrize(
    "options",
    [
        GRPOOptions(temperature=0.8, beta=0.1),
        GRPOOptions(loss_type="gspo", num_iterations=2),
        GRPOOptions(loss_type="dppo"),
        GRPOOptions(loss_type="rloo", importance_correction="sequence"),
    ],
    ids=lambda options: options.loss_type,
)
def test_the_engine_runs_them(options: GRPOOptions) -> None:
    """Traced, in one chunk and in four, in fp32; the gradient is that of float64 with the engine's logits."""
    batch = tiny.batches(0)[0]
    made_objective = policy(options).objective()
    generator = torch.Generator().manual_seed(2)
    n = len(batch.labels)
    values = {name: torch.randn(n, generator=generator) - 2.0 for name in made_objective.columns}
    values["weights"] = torch.rand(n, generator=generator) + 0.5
    values = {name: value.masked_fill(batch.labels == IGNORE_LABEL, 0.0) for name, value in values.items()}
    norms, found = [], []
    for chunks in (1, 4):
        engine = tiny.engine(objective=made_objective, head_chunks=chunks, columns=tuple(values))
        whole = replace(batch, columns=values, divisor=3.0)
        found.append(engine.logits(whole).double())
        loss, norm = engine.train_step([whole], step=1, lr=0.0).read()[:2]
        norms.append(norm)
        wide = {name: value.double() for name, value in values.items()}
        expected = engine_loss(made_objective, found[-1], batch.labels, batch.positions, wide) / 3
        assert loss == pytest.approx(expected.item(), rel=2e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert norms[0] > 0


def test_the_checks_for_plugins_hold() -> None:
    """One loss is enough here; the core's tests check all of them."""
    for check in bundle_checks("policy_loss", SPECS["gspo"]):
        check.run()
