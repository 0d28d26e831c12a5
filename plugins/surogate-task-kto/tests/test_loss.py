"""The losses against plain autograd in float64 and numbers computed by hand.

Shape suffixes: N tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
from surogate_task_kto import loss
from surogate_task_kto.options import KTOOptions
from torch import Tensor

LENGTHS = (5, 4, 3, 6, 2)
KINDS = (loss.GOOD, loss.BAD, loss.MISMATCHED, loss.MISMATCHED, 0.0)
POSITIONS_N = torch.cat([torch.arange(length) for length in LENGTHS]).int()
STARTS = [0, 5, 9, 12, 18]


def case(*, shift: float = 0.0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(logits, labels, columns) of two judged and two mismatched documents and padding."""
    generator = torch.Generator().manual_seed(0)
    n = len(POSITIONS_N)
    logits_NV = torch.randn(n, 11, generator=generator, dtype=torch.float64)
    labels_N = torch.randint(0, 11, (n,), generator=generator)
    labels_N[[0, 4, 5, 8, 11, 12, 17]] = -100
    labels_N[18:] = -100
    reference_N = -torch.rand(n, generator=generator) * 3 - shift
    kind_N = torch.cat([torch.full((length,), kind) for length, kind in zip(LENGTHS, KINDS, strict=True)])
    return logits_NV, labels_N, {loss.KIND: kind_N, loss.REFERENCE: torch.where(labels_N == -100, 0, reference_N)}


def plain(options: KTOOptions, logits_NV: Tensor, labels_N: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """TRL's formulas, document by document."""
    logp_N = logits_NV.log_softmax(-1).gather(-1, labels_N.clamp(min=0)[:, None])[:, 0]
    ratios, mismatched = [], []
    for start, length, kind in zip(STARTS, LENGTHS, KINDS, strict=True):
        own = slice(start, start + length)
        ratio = ((logp_N - columns[loss.REFERENCE])[own] * (labels_N[own] != -100)).sum()
        ratios.append((kind, ratio))
        mismatched += [ratio.detach()] if kind == loss.MISMATCHED else []
    z = torch.stack(mismatched).mean().clamp(min=0) if options.loss_type == "kto" else 0
    good = sum(1 - torch.sigmoid(options.beta * (ratio - z)) for kind, ratio in ratios if kind == loss.GOOD)
    bad = sum(1 - torch.sigmoid(options.beta * (z - ratio)) for kind, ratio in ratios if kind == loss.BAD)
    return options.desirable_weight * good + options.undesirable_weight * bad


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("shift", [0.0, 4.0])
def test_loss_and_gradient_are_those_of_plain_autograd(loss_type: str, shift: float) -> None:
    """With the shift the policy is far above its reference on the mismatched documents, so that z is above 0."""
    options = KTOOptions(beta=0.2, desirable_weight=1.5, undesirable_weight=0.7, loss_type=loss_type)  # type: ignore[arg-type]
    logits_NV, labels_N, columns = case(shift=shift)
    expected, own = (logits_NV.clone().requires_grad_() for _ in range(2))
    wanted = plain(options, expected, labels_N, columns)
    losses_N = loss.token_loss(own.float(), labels_N, columns)
    found = loss.sequence_loss(options, losses_N, POSITIONS_N, columns)
    assert found.shape == ()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(found, [own])
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, [expected])[0], rtol=1e-5, atol=1e-7)
    assert not gradient[9:].any()  # neither mismatched documents nor padding


def test_at_the_reference_both_losses_are_one_half() -> None:
    logits_NV, labels_N, columns = case()
    losses_N = loss.token_loss(logits_NV.float(), labels_N, columns)
    columns[loss.REFERENCE] = -losses_N
    assert loss.sequence_loss(KTOOptions(), losses_N, POSITIONS_N, columns).item() == pytest.approx(1.0)


def test_numbers_by_hand() -> None:
    """A good answer of ratio 2, a bad one of ratio -1, mismatched ones of 3 and 0: z is 1.5."""
    positions_N = torch.zeros(4, dtype=torch.int32)
    losses_N = -torch.tensor([2.0, -1.0, 3.0, 0.0])
    columns = {
        loss.KIND: torch.tensor([loss.GOOD, loss.BAD, loss.MISMATCHED, loss.MISMATCHED]),
        loss.REFERENCE: torch.zeros(4),
    }
    sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    found = loss.sequence_loss(KTOOptions(beta=0.5), losses_N, positions_N, columns).item()
    assert found == pytest.approx((1 - sigma(0.5 * 0.5)) + (1 - sigma(0.5 * 2.5)))
    columns[loss.KIND] = torch.tensor([loss.GOOD, loss.BAD, 0, 0])
    found = loss.sequence_loss(KTOOptions(beta=0.5), losses_N, positions_N, columns).item()
    assert found == pytest.approx((1 - sigma(1.0)) + (1 - sigma(0.5)))  # without mismatched documents z is 0
