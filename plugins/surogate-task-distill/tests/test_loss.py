"""The loss of distillation against plain autograd in float64 and numbers computed by hand.

Shape suffixes: N tokens, V vocabulary, K tokens of the teacher.
"""

from __future__ import annotations

import math

import pytest
import torch
from surogate_task_distill.loss import id_columns, logprob_columns, terms, token_figures, token_loss
from surogate_task_distill.options import DistillOptions
from torch import Tensor

LABELS_N = torch.tensor([3, -100, 0, 6, 1])


def case(top_k: int, temperature: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(logits of the student, logits of the teacher, columns) of five tokens and seven words."""
    generator = torch.Generator().manual_seed(0)
    logits_NV, teacher_NV = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    logprobs_NK, ids_NK = (teacher_NV / temperature).log_softmax(-1).topk(top_k, -1)
    columns = dict(zip(id_columns(top_k), ids_NK.float().T, strict=True))
    columns |= dict(zip(logprob_columns(top_k), logprobs_NK.float().T, strict=True))
    return logits_NV, teacher_NV, columns


def plain(logits_NV: Tensor, teacher_NV: Tensor, options: DistillOptions) -> Tensor:
    """[N] float64: the loss, with the tokens outside of the top K as one outcome."""
    p, q = (x.div(options.temperature).softmax(-1) for x in (logits_NV, teacher_NV))
    ids = q.topk(options.top_k, -1).indices
    outcomes = [torch.cat([x.gather(-1, ids), (1 - x.gather(-1, ids).sum(-1))[:, None]], -1) for x in (p, q)]
    kl = (outcomes[1] * (outcomes[1].log() - outcomes[0].log())).sum(-1)
    ce = torch.nn.functional.cross_entropy(logits_NV, LABELS_N, reduction="none", ignore_index=-100)
    loss = options.cross_entropy * ce + options.kd_weight * options.temperature**2 * kl
    return torch.where(LABELS_N == -100, 0, loss)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("top_k", [1, 3, 6])
@pytest.mark.parametrize("weights", [(0.5, None), (1.0, 0.0), (0.3, 2.0)])
def test_loss_and_gradient_are_those_of_plain_autograd(
    temperature: float, top_k: int, weights: tuple[float, float | None]
) -> None:
    options = DistillOptions(top_k=top_k, temperature=temperature, kd_weight=weights[0], ce_weight=weights[1])
    logits_NV, teacher_NV, columns = case(top_k, temperature)
    expected, own = (logits_NV.clone().requires_grad_() for _ in range(2))
    loss_N = plain(expected, teacher_NV, options)
    found_N = token_loss(options, own.float(), LABELS_N, columns)
    assert found_N.dtype == torch.float32
    torch.testing.assert_close(found_N.double(), loss_N, rtol=2e-6, atol=2e-6)
    coefficients = torch.arange(1.0, 6, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((loss_N * coefficients).sum(), [expected])
    (gradient,) = torch.autograd.grad((found_N * coefficients).sum(), [own])
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=2e-6)
    assert not gradient[1].any()


def test_numbers_by_hand() -> None:
    """Student (1/2, 1/4, 1/4), teacher (1/4, 1/2, 1/4) with K = 1: outcomes are its best token and the rest."""
    options = DistillOptions(top_k=1, kd_weight=1.0, ce_weight=1.0)
    logits_NV = torch.tensor([[0.5, 0.25, 0.25]]).log() + 3
    columns = {id_columns(1)[0]: torch.tensor([1.0]), logprob_columns(1)[0]: torch.tensor([math.log(0.5)])}
    ce_N, kl_N = terms(options, logits_NV, torch.tensor([0]), columns)
    assert ce_N.item() == pytest.approx(math.log(2))
    assert kl_N.item() == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75))
    assert [f.item() for f in token_figures(options, logits_NV, torch.tensor([0]), columns)][2] == 0


def test_the_divergence_of_equal_models_is_zero_and_so_is_its_gradient() -> None:
    options = DistillOptions(top_k=4, kd_weight=1.0, temperature=2.0)
    _, teacher_NV, columns = case(4, 2.0)
    own = teacher_NV.float().requires_grad_()
    loss_N = token_loss(options, own, LABELS_N, columns)
    assert loss_N.abs().max() < 1e-6
    assert torch.autograd.grad(loss_N.sum(), [own])[0].abs().max() < 1e-6
    assert token_figures(options, own, LABELS_N, columns)[2].tolist() == [1, 0, 1, 1, 1]


def test_a_certain_teacher_gives_a_finite_loss() -> None:
    """The K tokens have all of the probability: nothing is left for the rest."""
    options = DistillOptions(top_k=2, kd_weight=1.0)
    columns = dict(zip(id_columns(2), torch.tensor([[1.0], [2.0]]), strict=True))
    columns |= dict(zip(logprob_columns(2), torch.tensor([[0.0], [-1e4]]), strict=True))
    own = torch.randn(1, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss_N = token_loss(options, own, torch.tensor([1]), columns)
    torch.testing.assert_close(loss_N, -own.log_softmax(-1)[:, 1])
    assert torch.autograd.grad(loss_N.sum(), [own])[0].isfinite().all()


def test_the_weight_of_the_cross_entropy_is_what_the_divergence_leaves() -> None:
    assert DistillOptions(kd_weight=0.3).cross_entropy == pytest.approx(0.7)
    assert DistillOptions(kd_weight=2.0).cross_entropy == 0
    assert DistillOptions(ce_weight=0.25).cross_entropy == 0.25
