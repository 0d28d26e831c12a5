"""The losses of pairs and their gradients, against plain autograd in float64 on separate answers, and by hand.

Shape suffixes: N tokens of a micro-batch, T tokens of an answer, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from surogate_task_preference import objectives
from surogate_task_preference.objectives import FIGURES, PREFERRED, TRAINED
from surogate_task_preference.options import DPOOptions, IPOOptions, ORPOOptions, SimPOOptions
from torch import Tensor

from surogate_core.plugin import IGNORE_LABEL, REFERENCE, bundles
from surogate_testing import objectives as checks

V = 11
ANSWERS = ((5, 3), (2, 7), (4, 4))
"""Tokens of the chosen and the rejected document of each pair; the first of each is a prompt without a label."""


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def micro_batch(order: Sequence[int] = (0, 1, 2), padding: int = 3) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(logits, labels, positions, columns) of the pairs in an order, and padding."""
    parts: list[tuple[Tensor, ...]] = []
    for pair in order:
        for place, length in enumerate(ANSWERS[pair]):
            generator = torch.Generator().manual_seed(10 * pair + place)
            labels = torch.randint(0, V, (length,), generator=generator)
            labels[-1] = IGNORE_LABEL  # the last token predicts nothing
            side = torch.full((length,), 1.0 - 2 * place)
            trained = (labels != IGNORE_LABEL).float()
            logits = torch.randn(length, V, generator=generator, dtype=torch.float64)
            reference = -torch.rand(length, generator=generator) * trained
            parts.append((logits, labels, torch.arange(length), side, trained, reference))
    filler = torch.zeros(padding)
    parts.append(
        (
            torch.zeros(padding, V, dtype=torch.float64),
            torch.full((padding,), IGNORE_LABEL),
            torch.arange(padding),
            filler,
            filler,
            filler,
        )
    )
    logits, labels, positions, side, trained, reference = (torch.cat(column) for column in zip(*parts, strict=True))
    return logits, labels, positions.int(), {PREFERRED: side, TRAINED: trained, REFERENCE: reference}


def token_logprobs(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    picked_N = logits_NV.double().log_softmax(-1).gather(1, labels_N.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels_N != IGNORE_LABEL, picked_N, torch.zeros_like(picked_N))


def plain(formula: Any, logits_NV: Tensor, labels_N: Tensor, columns: dict[str, Tensor], order: Any) -> Tensor:
    """The summed loss by a formula on separate answers, in float64."""
    logprobs_N = token_logprobs(logits_NV, labels_N)
    at, total = 0, torch.zeros((), dtype=torch.float64)
    for pair in order:
        found = []
        for length in ANSWERS[pair]:
            span = slice(at, at + length)
            at += length
            ratio = (logprobs_N[span] - columns[REFERENCE][span].double()).sum()
            found.append((logprobs_N[span].sum(), ratio, length - 1))
        (logp_w, ratio_w, n_w), (logp_l, ratio_l, n_l) = found
        total = total + formula(
            ratio_w=ratio_w, ratio_l=ratio_l, mean_w=logp_w / n_w, mean_l=logp_l / n_l, n_w=n_w, n_l=n_l
        )
    return total


def logsigmoid(x: Tensor) -> Tensor:
    return -torch.log(1 + torch.exp(-x))


def odds(mean: Tensor) -> Tensor:
    return torch.log(torch.exp(mean) / (1 - torch.exp(mean)))


B, E = 0.3, 0.2
CASES: dict[str, tuple[bundles.Objective, Any]] = {
    "sigmoid": (
        objectives.dpo(DPOOptions(beta=B)),
        lambda ratio_w, ratio_l, **_: -logsigmoid(B * (ratio_w - ratio_l)),
    ),
    "conservative": (
        objectives.dpo(DPOOptions(beta=B, label_smoothing=E)),
        lambda ratio_w, ratio_l, **_: (
            -(1 - E) * logsigmoid(B * (ratio_w - ratio_l)) - E * logsigmoid(-B * (ratio_w - ratio_l))
        ),
    ),
    "robust": (
        objectives.dpo(DPOOptions(beta=B, label_smoothing=E, loss_type="robust")),
        lambda ratio_w, ratio_l, **_: (
            (-(1 - E) * logsigmoid(B * (ratio_w - ratio_l)) + E * logsigmoid(-B * (ratio_w - ratio_l))) / (1 - 2 * E)
        ),
    ),
    "hinge": (
        objectives.dpo(DPOOptions(beta=B, loss_type="hinge")),
        lambda ratio_w, ratio_l, **_: torch.relu(1 - B * (ratio_w - ratio_l)),
    ),
    "exo_pair": (
        objectives.dpo(DPOOptions(beta=B, label_smoothing=E, loss_type="exo_pair")),
        lambda ratio_w, ratio_l, **_: (
            torch.sigmoid(B * (ratio_w - ratio_l)) * (logsigmoid(B * (ratio_w - ratio_l)) - math.log(1 - E))
            + torch.sigmoid(B * (ratio_l - ratio_w)) * (logsigmoid(B * (ratio_l - ratio_w)) - math.log(E))
        ),
    ),
    "nca_pair": (
        objectives.dpo(DPOOptions(beta=B, loss_type="nca_pair")),
        lambda ratio_w, ratio_l, **_: (
            -logsigmoid(B * ratio_w) - 0.5 * logsigmoid(-B * ratio_w) - 0.5 * logsigmoid(-B * ratio_l)
        ),
    ),
    "sppo_hard": (
        objectives.dpo(DPOOptions(beta=B, loss_type="sppo_hard")),
        lambda ratio_w, ratio_l, **_: (ratio_w - 0.5 / B) ** 2 + (ratio_l + 0.5 / B) ** 2,
    ),
    "apo_zero": (
        objectives.dpo(DPOOptions(beta=B, loss_type="apo_zero")),
        lambda ratio_w, ratio_l, **_: 1 - torch.sigmoid(B * ratio_w) + torch.sigmoid(B * ratio_l),
    ),
    "apo_down": (
        objectives.dpo(DPOOptions(beta=B, loss_type="apo_down")),
        lambda ratio_w, ratio_l, **_: torch.sigmoid(B * ratio_w) + 1 - torch.sigmoid(B * (ratio_w - ratio_l)),
    ),
    "with sft": (
        objectives.dpo(DPOOptions(beta=B, sft_weight=0.7)),
        lambda ratio_w, ratio_l, mean_w, **_: -logsigmoid(B * (ratio_w - ratio_l)) - 0.7 * mean_w,
    ),
    "dpo's ipo": (
        objectives.dpo(DPOOptions(beta=B, loss_type="ipo")),
        lambda ratio_w, ratio_l, n_w, n_l, **_: (ratio_w / n_w - ratio_l / n_l - 1 / (2 * B)) ** 2,
    ),
    "ipo": (
        objectives.ipo(IPOOptions(beta=B)),
        lambda ratio_w, ratio_l, n_w, n_l, **_: (ratio_w / n_w - ratio_l / n_l - 1 / (2 * B)) ** 2,
    ),
    "orpo": (
        objectives.orpo(ORPOOptions(beta=B)),
        lambda mean_w, mean_l, **_: -mean_w - B * logsigmoid(odds(mean_w) - odds(mean_l)),
    ),
    "simpo": (
        objectives.simpo(SimPOOptions(beta=2.5, gamma=0.6)),
        lambda mean_w, mean_l, **_: -logsigmoid(2.5 * (mean_w - mean_l) - 0.6),
    ),
    "simpo with sft": (
        objectives.simpo(SimPOOptions(beta=2.5, gamma=0.6, sft_weight=0.4)),
        lambda mean_w, mean_l, **_: -logsigmoid(2.5 * (mean_w - mean_l) - 0.6) - 0.4 * mean_w,
    ),
}


def by_two_passes(
    objective: bundles.Objective, logits_NV: Tensor, labels_N: Tensor, positions_N: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """(loss, gradient of the logits) as the engine computes them."""
    own = {name: columns[name] for name in objective.columns}
    leaf = logits_NV.float().requires_grad_()
    losses_N = objective.token_loss(leaf, labels_N, own)
    assert objective.sequence_loss is not None
    cut_N = losses_N.detach().requires_grad_()
    loss = objective.sequence_loss(cut_N, positions_N, own)
    (coefficients_N,) = torch.autograd.grad(loss, [cut_N])
    (gradient,) = torch.autograd.grad((losses_N * coefficients_N).sum(), [leaf])
    return loss.detach(), gradient


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_plain_autograd_in_float64(name: str) -> None:
    objective, formula = CASES[name]
    logits_NV, labels_N, positions_N, columns = micro_batch()
    loss, gradient = by_two_passes(objective, logits_NV, labels_N, positions_N, columns)
    leaf = logits_NV.clone().requires_grad_()
    expected = plain(formula, leaf, labels_N, columns, (0, 1, 2))
    (wanted,) = torch.autograd.grad(expected, [leaf])
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=2e-5, atol=2e-6)
    assert not gradient[labels_N == IGNORE_LABEL].any()


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "orpo", "simpo"])
def test_a_pair_has_the_same_bits_wherever_it_is_packed(name: str) -> None:
    objective = CASES[name][0]
    logits_NV, labels_N, positions_N, columns = micro_batch()
    whole = by_two_passes(objective, logits_NV, labels_N, positions_N, columns)[1]
    at = 0
    for pair, lengths in enumerate(ANSWERS):
        alone = by_two_passes(objective, *micro_batch((pair,), padding=9))[1]
        size = sum(lengths)
        assert torch.equal(alone[:size], whole[at : at + size])
        at += size


def values(
    objective: bundles.Objective, chosen: list[float], rejected: list[float], **columns: list[float]
) -> tuple[Any, Any]:
    """(loss, figures) of one pair whose tokens have these log-probabilities, the last one without a label."""
    losses_N = -torch.tensor([*chosen, 0.0, *rejected, 0.0])
    positions_N = torch.tensor([*range(len(chosen) + 1), *range(len(rejected) + 1)], dtype=torch.int32)
    given = {
        PREFERRED: torch.tensor([1.0] * (len(chosen) + 1) + [-1.0] * (len(rejected) + 1)),
        TRAINED: (losses_N != 0).float(),
        **{name: torch.tensor(column) for name, column in columns.items()},
    }
    assert objective.sequence_loss is not None
    assert objective.sequence_figures is not None
    loss = objective.sequence_loss(losses_N, positions_N, given).item()
    sums = [value.item() for value in objective.sequence_figures(losses_N, positions_N, given)]
    return loss, dict(zip(FIGURES, sums, strict=True))


def test_dpo_by_hand() -> None:
    reference = [-0.5, -1.5, 0.0, -1.0, 0.0]
    loss, figures = values(objectives.dpo(DPOOptions()), [-1.0, -0.5], [-2.0], reference_logprobs=reference)
    # Ratios: 0.5 for the chosen answer, -1 for the other; a tenth of them are the rewards.
    assert loss == pytest.approx(softplus(-0.15))
    expected = (1, 0.05, -0.1, 0.15, 1, -1.5, -2.0)
    assert figures == pytest.approx(dict(zip(FIGURES, expected, strict=True)))
    free, figures = values(objectives.dpo(DPOOptions(reference_free=True)), [-1.0, -0.5], [-2.0])
    assert free == pytest.approx(softplus(-0.05))
    assert figures["rewards/chosen"] == pytest.approx(-0.15)


def test_the_loss_of_the_reference_itself_is_log_2() -> None:
    own = [-1.0, -0.5, 0.0, -2.0, 0.0]
    loss, figures = values(objectives.dpo(DPOOptions()), [-1.0, -0.5], [-2.0], reference_logprobs=own)
    assert loss == pytest.approx(math.log(2), rel=1e-7)
    assert (figures["rewards/margins"], figures["rewards/accuracies"]) == (0, 0)


def test_ipo_by_hand() -> None:
    reference = [-0.5, -1.5, 0.0, -1.0, 0.0]
    loss, _ = values(objectives.ipo(IPOOptions(beta=0.5)), [-1.0, -0.5], [-2.0], reference_logprobs=reference)
    assert loss == pytest.approx((0.25 + 1 - 1) ** 2)


def test_orpo_by_hand() -> None:
    loss, figures = values(objectives.orpo(ORPOOptions()), [math.log(0.5)] * 2, [math.log(0.2)])
    # Odds: 1 and 1/4.
    assert loss == pytest.approx(math.log(2) + 0.1 * softplus(-math.log(4)))
    assert figures["rewards/margins"] == pytest.approx(0.1 * math.log(2.5))
    certain, _ = values(objectives.orpo(ORPOOptions()), [-1e-9], [-30.0])
    assert math.isfinite(certain)
    assert certain == pytest.approx(0, abs=1e-5)


def test_simpo_by_hand() -> None:
    loss, figures = values(objectives.simpo(SimPOOptions()), [-1.0, -0.5], [-2.0])
    assert loss == pytest.approx(softplus(-(2 * 1.25 - 1)))
    assert figures["rewards/margins"] == pytest.approx(2.5)
    assert figures["logps/chosen"] == pytest.approx(-1.5)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "no effect with dpo_loss_type=hinge"),
        ({"loss_type": "exo_pair"}, "needs a dpo_label_smoothing above 0"),
    ],
)
def test_a_smoothing_that_does_not_fit_is_refused(keys: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DPOOptions(**keys)


OF_TOKENS = [check for check in checks.OF_OBJECTIVES if check is not checks.trains]
"""The micro-batches of `trains` have no pairs; test_task.py trains on some."""


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "orpo", "simpo"])
@pytest.mark.parametrize("check", OF_TOKENS, ids=lambda check: check.__name__)
def test_the_objectives_are_sound(check: Callable[[bundles.Objective], None], name: str) -> None:
    check(CASES[name][0])
