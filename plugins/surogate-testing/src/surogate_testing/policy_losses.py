"""Checks of policy losses: a loss for each token, its gradient, its aggregation, training.

Each runs the loss as a run does, with one iteration and with two. Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from surogate_core.plugin import IGNORE_LABEL, WEIGHTS, bundles
from surogate_reinforcement.policy import Policy
from surogate_reinforcement.policy_terms import ADVANTAGES, BEHAVIOUR, OLD, CompletionSums, terms
from surogate_testing import tiny
from surogate_testing.check import ensure

LENGTHS = ((3, 2), (1, 4))
"""Trained tokens of each document, of two micro-batches."""
V = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The settings of a run, with the defaults of `surogate grpo`."""

    temperature: float = 1.0
    num_iterations: int = 1
    max_completion_length: int = 8
    beta: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    epsilon: float | None = None
    epsilon_high: float | None = None
    importance_correction: Literal["token", "sequence", "none"] = "token"
    importance_clip: float = 2.0


def terms_of(
    *, ratio_N: Tensor, advantages_N: Tensor, logp_N: Tensor | None = None, low: float = 0.2, high: float = 0.2
) -> bundles.PolicyTerms:
    """The terms of one completion's tokens with these ratios, sampled by the old policy, for a test by hand.

    `logp_N`: log π of each token, whose gradient the ratio then has; -1 with the gradient of the ratio if left out.
    """
    if logp_N is not None:
        ratio_N = ratio_N.detach() * (logp_N - logp_N.detach()).exp()
    log_ratio_N = ratio_N.log()
    if logp_N is None:
        logp_N = torch.full_like(ratio_N, -1.0) + (log_ratio_N - log_ratio_N.detach())
    old_N = logp_N.detach() - log_ratio_N.detach()
    return bundles.PolicyTerms(
        logp_N=logp_N,
        old_N=old_N,
        behaviour_N=old_N,
        advantages_N=advantages_N,
        log_ratio_N=log_ratio_N,
        ratio_N=ratio_N,
        low=low,
        high=high,
        total=lambda x_N: x_N.sum().expand_as(x_N),
    )


def _policies(spec: bundles.PolicyLossSpec) -> Iterator[Policy]:
    """With default options, with one iteration and with two."""
    for iterations in (1, 2):
        yield Policy(bundles.part_of("policy_loss", spec), LossSettings(num_iterations=iterations))


def _case(policy: Policy, *, number: int = 0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(logits, labels, positions, columns) of a micro-batch, each document with a token before and one behind."""
    generator = torch.Generator().manual_seed(seed)
    labels, positions = [], []
    for length in LENGTHS[number]:
        label = torch.full((length + 2,), IGNORE_LABEL)
        label[1:-1] = torch.randint(0, V, (length,), generator=generator)
        labels.append(label)
        positions.append(torch.arange(length + 2, dtype=torch.int32))
    labels_N, positions_N = torch.cat(labels), torch.cat(positions)
    trained_N, n = labels_N != IGNORE_LABEL, len(labels_N)
    logits_NV = torch.randn(n, V, generator=generator)
    logp_N = logits_NV.log_softmax(-1).gather(1, labels_N.clamp(min=0)[:, None])[:, 0]
    old_N = logp_N + 0.3 * torch.randn(n, generator=generator)
    counts = [list(lengths) for lengths in LENGTHS]
    divided = policy.aggregation(counts, sum(map(len, LENGTHS)))[number]
    found = {
        ADVANTAGES: torch.cat(
            [torch.full((k + 2,), value) for k, value in zip(LENGTHS[number], (1.5, -0.5), strict=True)]
        ),
        BEHAVIOUR: old_N + 0.3 * torch.randn(n, generator=generator),
        OLD: old_N,
        WEIGHTS: torch.cat([torch.full((k + 2,), w) for k, w in zip(LENGTHS[number], divided.weights, strict=True)]),
    }
    columns = {name: found[name].masked_fill(~trained_N, 0.0) for name in (*policy.columns, WEIGHTS)}
    return logits_NV, labels_N, positions_N, columns


def _loss(policy: Policy, case: tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]) -> Tensor:
    """The summed loss of a micro-batch, as the engine computes it."""
    logits_NV, labels_N, positions_N, columns = case
    objective = policy.objective()
    loss_N = objective.token_loss(logits_NV, labels_N, columns)
    if objective.sequence_loss is not None:
        return objective.sequence_loss(loss_N, positions_N, columns)
    return (loss_N * columns[WEIGHTS]).sum()


def _gradient(policy: Policy, case: tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """(loss, its gradient by the logits [N, V])."""
    leaf_NV = case[0].clone().requires_grad_()
    loss = _loss(policy, (leaf_NV, *case[1:]))
    return loss.detach(), torch.autograd.grad(loss, [leaf_NV])[0]


def gives_a_loss_for_each_token(spec: bundles.PolicyLossSpec) -> None:
    """[N] of the dtype of the terms, finite, also where the model has moved far; its gradient is finite too."""
    for policy in _policies(spec):
        for moved, advantage in itertools.product((-40.0, -1.0, 0.0, 1.0, 40.0), (-2.0, 0.0, 2.0)):
            policy.trial(moved, advantage)


def makes_rewarded_completions_more_probable(spec: bundles.PolicyLossSpec) -> None:
    """While the model has not moved, the loss falls with the probability of a token whose advantage is positive, and
    rises with that of a token whose advantage is negative.
    """
    for policy in _policies(spec):
        for advantage in (-1.0, 1.0):
            _, gradient_N = policy.trial(0.0, advantage)
            found = f"the gradient by log π is {gradient_N.tolist()} for the advantage {advantage:g}"
            ensure(bool((gradient_N * advantage < 0).all()), found)


def trains_the_sampled_tokens_alone(spec: bundles.PolicyLossSpec) -> None:
    """A token that the model did not sample has no gradient, and some that it did have one."""
    for policy in _policies(spec):
        case = _case(policy)
        loss, gradient_NV = _gradient(policy, case)
        ignored_N = case[1] == IGNORE_LABEL
        ensure(bool(loss.isfinite()) and bool(gradient_NV.isfinite().all()), "the loss or its gradient is not finite")
        ensure(not gradient_NV[ignored_N].any(), "a token without a label has a gradient")
        ensure(bool(gradient_NV[~ignored_N].any()), "no sampled token has a gradient")


def does_not_look_at_other_completions(spec: bundles.PolicyLossSpec) -> None:
    """The gradient of a completion is the same beside other logits of another completion in its row."""
    for policy in _policies(spec):
        case, first = _case(policy), LENGTHS[0][0] + 2
        other = torch.cat((case[0][:first], _case(policy, seed=1)[0][first:]))
        gradients = [_gradient(policy, (logits_NV, *case[1:]))[1][:first] for logits_NV in (case[0], other)]
        error = tiny.relative_error(gradients[1], gradients[0])
        ensure(error <= 1e-5, f"beside another completion: relative error {error:.1e}")


def is_pure(spec: bundles.PolicyLossSpec) -> None:
    """Equal terms give equal bits, and the loss writes into none of them: a run that was killed repeats its steps."""
    for policy in _policies(spec):
        logits_NV, labels_N, positions_N, columns = _case(policy)
        logp_N = logits_NV.log_softmax(-1).gather(1, labels_N.clamp(min=0)[:, None])[:, 0]
        documents = CompletionSums.of(positions_N, columns) if policy.by_sequence else None
        seen = terms(policy.part, policy.settings, logp_N, columns, documents)
        before = {name: value.clone() for name, value in _tensors(seen).items()}
        first_N = policy.loss.loss(seen)
        changed = [name for name, value in _tensors(seen).items() if not torch.equal(value, before[name])]
        ensure(not changed, f"it writes into {', '.join(changed)}")
        ensure(torch.equal(policy.loss.loss(seen), first_N), "equal terms give another loss the second time")


def _tensors(seen: bundles.PolicyTerms) -> dict[str, Tensor]:
    found = {field.name: getattr(seen, field.name) for field in fields(seen)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def weighs_every_completion(spec: bundles.PolicyLossSpec) -> None:
    """The aggregation gives a weight above 0 for each document, and divisors that add up to more than 0, also with
    micro-batches of padding and with completions that are left out.
    """
    policy = next(_policies(spec))
    for batches, completions in (([[3, 2], [1, 4]], 4), ([[5]], 1), ([[], [2]], 3), ([[1], []], 1)):
        divided = policy.aggregation(batches, completions)
        total = sum(one.divisor for one in divided)
        ensure(total > 0, f"the divisor of a step with {batches} trained tokens is {total}")
        first, second = (policy.aggregation(batches, completions) for _ in range(2))
        ensure(first == second, "equal completions have other weights the second time")


def reports_its_figures(spec: bundles.PolicyLossSpec) -> None:
    """Each figure: finite, one value a token or 0-d."""
    for policy in _policies(spec):
        logits_NV, labels_N, positions_N, columns = _case(policy)
        objective = policy.objective()
        found: list[Tensor] = []
        with torch.no_grad():
            loss_N = objective.token_loss(logits_NV, labels_N, columns)
            if objective.token_figures is not None:
                found += objective.token_figures(logits_NV, labels_N, columns)
            if objective.sequence_figures is not None:
                found += objective.sequence_figures(loss_N, positions_N, columns)
        for name, value in zip(objective.figures, found, strict=True):
            values = value[labels_N != IGNORE_LABEL] if value.dim() else value
            ensure(bool(values.isfinite().all()), f"{name} is not finite")


def trains(spec: bundles.PolicyLossSpec) -> None:
    """It is traced with the head, whole or in chunks, and the loss is the one that plain torch computes."""
    batch = tiny.batches(0)[0]
    trained_N = batch.labels != IGNORE_LABEL
    divisor, labels_N1 = float(trained_N.sum()), batch.labels.clamp(min=0)[:, None]
    for policy, chunks in zip(_policies(spec), (1, 4), strict=True):
        generator, names = torch.Generator().manual_seed(0), (*policy.columns, WEIGHTS)
        engine = tiny.engine(objective=policy.objective(), head_chunks=chunks, columns=names)
        blank = replace(batch, columns=dict.fromkeys(names, torch.zeros(tiny.TOKENS)), divisor=divisor)
        logits_NV = engine.logits(blank)
        # The model has moved so little that no bound is reached.
        past_N = logits_NV.log_softmax(-1).gather(1, labels_N1)[:, 0] - 1e-4
        advantages_N = torch.randn(tiny.TOKENS, generator=generator)
        found = {ADVANTAGES: advantages_N, BEHAVIOUR: past_N, OLD: past_N, WEIGHTS: torch.ones(tiny.TOKENS)}
        columns = {name: found[name].masked_fill(~trained_N, 0.0) for name in names}
        expected = _loss(policy, (logits_NV, batch.labels, batch.positions, columns)) / divisor
        whole = replace(blank, columns=columns)
        loss, norm = engine.train_step([whole], step=0, lr=0.0).read()[:2]
        ensure(math.isfinite(norm) and norm > 0, f"the gradient norm is {norm}")
        ensure(
            math.isclose(loss, float(expected), rel_tol=1e-3, abs_tol=1e-6),
            f"the traced loss is {loss:g}, and plain torch computes {float(expected):g}",
        )


CHECKS = (
    gives_a_loss_for_each_token,
    makes_rewarded_completions_more_probable,
    trains_the_sampled_tokens_alone,
    does_not_look_at_other_completions,
    is_pure,
    weighs_every_completion,
    reports_its_figures,
    trains,
)
