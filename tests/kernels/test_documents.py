"""Sums over documents. Shape suffix: N tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.dsl.trace import Signature, with_gradients
from surogate_core.kernels.documents import document_starts, document_sums, segment_sums

LENGTHS = [(7,), (1, 1, 1), (3, 1, 9, 4, 200, 2), (64, 64)]


def positions(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])


def drawn(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_token_has_the_sum_of_its_document(lengths: tuple[int, ...]) -> None:
    x_N = drawn(sum(lengths))
    found_N = document_sums(x_N, positions(lengths))
    expected_N = torch.cat([part.double().sum().expand(len(part)) for part in x_N.split(lengths)])
    assert found_N.dtype == torch.float32
    torch.testing.assert_close(found_N, expected_N.float(), rtol=2e-7, atol=1e-7)


def test_a_row_that_continues_a_document_before_it_is_a_document_too() -> None:
    """Positions that do not begin at 0."""
    found_N = document_sums(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([5, 6, 0, 1]))
    assert found_N.tolist() == [3.0, 3.0, 12.0, 12.0]


def test_a_document_has_the_same_bits_wherever_it_lies() -> None:
    document_N = drawn(77) * 1e3
    alone = document_sums(document_N, positions((77,)))[0]
    for before, after in ((1, 5), (130, 2), (12, 300)):
        x_N = torch.cat([drawn(before, 1), document_N, drawn(after, 2)])
        found_N = document_sums(x_N, positions((before, 77, after)))
        assert (found_N[before : before + 77] == alone).all()


def test_many_equal_values_are_summed_exactly() -> None:
    x_N = torch.full((5000,), 0.1)
    assert document_sums(x_N, positions((5000,)))[0] == torch.tensor(0.1).double().mul(5000).float()


def test_a_segment_may_hold_several_documents() -> None:
    starts_N = torch.tensor([True, False, False, True, False])
    assert segment_sums(torch.arange(5.0), starts_N).tolist() == [3.0, 3.0, 3.0, 7.0, 7.0]
    assert document_starts(torch.tensor([0, 1, 0, 1, 2])).tolist() == [True, False, True, False, False]


def test_the_gradient_is_that_of_plain_autograd() -> None:
    x_N = drawn(15).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: document_sums(x, positions((4, 1, 10))).sin(), (x_N,))


def test_an_objective_may_be_traced_with_it() -> None:
    n = 12
    positions_N = positions((5, 3, 4))

    def loss(x_N: Tensor, places_N: Tensor) -> Tensor:
        return (document_sums(x_N, places_N).sigmoid() * document_starts(places_N)).sum()

    device = torch.device("cpu")
    inputs = [Signature((n,), torch.float32, device, True), Signature((n,), torch.int32, device)]
    program = with_gradients(loss, inputs, compiler="fx")
    x_N = drawn(n).requires_grad_()
    expected = loss(x_N, positions_N)
    (gradient_N,) = torch.autograd.grad(expected, [x_N])
    found, found_N = program([x_N.detach(), positions_N, torch.ones(())])
    assert found == expected
    assert torch.equal(found_N, gradient_N)


@pytest.mark.gpu
def test_a_gpu_has_the_bits_of_a_cpu() -> None:
    places_N = positions((3, 100, 1, 4000, 12))
    x_N = drawn(len(places_N))
    first_N, second_N = (document_sums(x_N.cuda(), places_N.cuda()) for _ in range(2))
    assert torch.equal(first_N, second_N)
    assert torch.equal(first_N.cpu(), document_sums(x_N, places_N))
