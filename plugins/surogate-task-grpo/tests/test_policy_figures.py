"""The figures of a step equal numbers computed by hand.

Shape suffixes: N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from surogate_task_grpo.options import GRPOOptions
from surogate_task_grpo.policy_losses import POLICY_LOSSES

from surogate_core.plugin import IGNORE_LABEL, bundles
from surogate_reinforcement.policy import Policy
from surogate_testing import tiny

SPECS = {spec.name: spec for spec in POLICY_LOSSES}

LENGTHS = (4, 3)
"""Tokens of two completions' documents; the first token of each is a prompt."""


def objective(options: GRPOOptions) -> bundles.Objective:
    return Policy(bundles.part_of("policy_loss", SPECS[options.loss_type]), options).objective()


def step(
    options: GRPOOptions, probabilities: Sequence[float], advantages: Sequence[float], **others: Sequence[float]
) -> dict[str, float]:
    """The figures of a micro-batch of two documents with 3 and 2 trained tokens, as the engine adds them up.

    `probabilities` are those of the labels among two tokens, `others` columns as probabilities.
    """
    made, n = objective(options), sum(LENGTHS)
    places = [0, 1, 2, 4, 5]  # the last position of a document predicts nothing
    labels_N, logits_N2 = torch.full((n,), IGNORE_LABEL), torch.zeros(n, 2, dtype=torch.float64)
    labels_N[places] = 0
    p_K = torch.tensor(probabilities, dtype=torch.float64)
    logits_N2[places] = torch.stack((p_K, 1 - p_K), 1).log() * options.temperature
    columns = {name: torch.zeros(n, dtype=torch.float64) for name in (*made.columns, "weights")}
    for name, values in others.items():
        columns[name][places] = torch.tensor(values, dtype=torch.float64).log()
    columns["advantages"][places] = torch.tensor(advantages, dtype=torch.float64)
    columns["weights"][places] = 1.0
    assert made.token_figures is not None
    trained_N = labels_N != IGNORE_LABEL
    found = {}
    for name, value_N in zip(made.figures, made.token_figures(logits_N2, labels_N, columns), strict=False):
        over = value_N[trained_N]
        found[name] = (over.max() if name in made.largest else over.mean()).item()
    if made.sequence_figures is not None:
        positions_N = torch.cat([torch.arange(length, dtype=torch.int32) for length in LENGTHS])
        losses_N = made.token_loss(logits_N2, labels_N, columns)
        count, *sums = made.sequence_figures(losses_N, positions_N, columns)
        names = made.figures[made.of_tokens + 1 :]
        found |= {name: (value / count).item() for name, value in zip(names, sums, strict=True)}
        found["completions"] = count.item()
    return found


P = [0.5, 0.6, 0.2, 0.9, 0.5]
OLD = {"old_logprobs": [0.5, 0.4, 0.4, 0.6, 0.5]}
"""Ratios 1, 1.5, 0.5, 1.5, 1; of the completions .75 and 1.5."""
SIGNS = [1.0, 1.0, 1.0, -1.0, -1.0]


def test_entropy_and_gap() -> None:
    behaviour = [0.5, 0.6 * math.exp(-0.2), 0.2, 0.9 * math.exp(-0.05), 0.5 * math.exp(0.1)]
    for temperature in (1.0, 0.5):
        options = GRPOOptions(importance_correction="none", temperature=temperature)
        found = step(options, P, SIGNS, behaviour_logprobs=behaviour)
        entropy = sum(-p * math.log(p) - (1 - p) * math.log(1 - p) for p in P) / 5
        assert found == pytest.approx(
            {"entropy": entropy, "logprob_gap/mean": 0.35 / 5, "logprob_gap/max": 0.2}, abs=1e-12
        )


def test_importance_weights() -> None:
    behaviour = [0.5, 0.6 / 4, 0.2 * 2, 0.9, 0.5]  # weights 1, 4, 1/2, 1, 1; of the completions 2 and 1
    found = step(GRPOOptions(importance_clip=1.5), P, SIGNS, behaviour_logprobs=behaviour)
    assert found["importance/mean"] == pytest.approx(7.5 / 5)
    assert found["importance/truncated"] == pytest.approx(1 / 5)
    options = GRPOOptions(importance_correction="sequence", importance_clip=1.5)
    found = step(options, P, SIGNS, behaviour_logprobs=behaviour)
    assert found["importance/mean"] == pytest.approx(3 / 2)
    assert found["importance/truncated"] == pytest.approx(1 / 2)
    assert found["completions"] == 2


def test_clipped_ratios() -> None:
    """A ratio has no gradient if it rose with a positive advantage, or fell with a negative one."""
    same = {"behaviour_logprobs": OLD["old_logprobs"], **OLD}

    def shares(signs: Sequence[float], **changes: object) -> tuple[float, float, float]:
        found = step(GRPOOptions(num_iterations=2, **changes), P, signs, **same)
        return tuple(found[f"clip_ratio/{name}"] for name in ("low", "high", "region"))

    assert shares(SIGNS) == pytest.approx((0, 1 / 5, 1 / 5))
    assert shares([-s for s in SIGNS]) == pytest.approx((1 / 5, 1 / 5, 2 / 5))
    assert shares(SIGNS, loss_type="gspo") == pytest.approx((0, 0, 0))
    assert shares([-s for s in SIGNS], loss_type="gspo") == pytest.approx((1 / 2, 1 / 2, 1))
    assert shares([-s for s in SIGNS], loss_type="rloo") == pytest.approx((1 / 2, 1 / 2, 1))
    assert shares(SIGNS, loss_type="cispo", epsilon_high=1.4) == pytest.approx((0, 1 / 5, 1 / 5))
    # dppo: probabilities changed by 0, .2, -.2, .3 and 0.
    assert shares(SIGNS, loss_type="dppo", epsilon_high=0.15) == pytest.approx((0, 1 / 5, 1 / 5))
    assert shares([-s for s in SIGNS], loss_type="dppo", epsilon=0.15) == pytest.approx((1 / 5, 1 / 5, 2 / 5))


def test_divergence() -> None:
    reference = {"reference_logprobs": [0.25, 0.6, 0.2, 0.9, 0.5]}
    expected = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": math.log(2) - 0.5}
    for name, value in expected.items():
        options = GRPOOptions(beta=0.1, kl_estimator=name)
        assert step(options, P, SIGNS, behaviour_logprobs=P, **reference)["kl"] == pytest.approx(value / 5)
    assert "kl" in step(GRPOOptions(beta=0.1, loss_type="rloo"), P, SIGNS, behaviour_logprobs=P, **reference)


def test_figures_that_say_nothing_are_left_out() -> None:
    plain = {"entropy", "logprob_gap/mean", "logprob_gap/max"}
    assert set(objective(GRPOOptions(importance_correction="none")).figures) == plain
    importance = {"importance/mean", "importance/truncated"}
    clips = {"clip_ratio/low", "clip_ratio/high", "clip_ratio/region"}
    assert set(objective(GRPOOptions()).figures) == plain | importance
    assert set(objective(GRPOOptions(loss_type="dppo")).figures) == plain | clips
    several = objective(GRPOOptions(loss_type="gspo", num_iterations=2, beta=0.1))
    assert set(several.figures) == plain | importance | clips | {"kl", "completions"}
    assert several.figures[several.of_tokens] == several.count == "completions"


def test_the_engine_reports_them() -> None:
    made = objective(GRPOOptions(loss_type="gspo", num_iterations=2, importance_correction="sequence", beta=0.1))
    names = (*made.columns, "weights")
    engine = tiny.engine(objective=made, columns=names, head_chunks=3)
    batch = tiny.batches(0)[0]
    trained_N = batch.labels != IGNORE_LABEL
    columns = {name: torch.where(trained_N, 1.0 if name == "weights" else -2.0, 0.0) for name in names}
    found = engine.train_step([replace(batch, columns=columns, divisor=3.0)], step=0, lr=0.0).figures()
    assert set(found) == set(made.figures)
    assert found["completions"] == len(tiny.LENGTHS)
    logits_NV = engine.logits(replace(batch, columns=columns)).double()
    entropy_N = torch.distributions.Categorical(logits=logits_NV).entropy()
    assert found["entropy"] == pytest.approx(entropy_N[trained_N].mean().item(), rel=1e-5)
    assert found["importance/mean"] == pytest.approx(1.0)
    assert found["logprob_gap/max"] == 0.0
