"""The order of a step's sums: each rank's share, and the same bits for any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.bundles.fabrics import Fabric
from surogate_core.engine.ranks.lanes import Lanes, Share
from surogate_core.kernels.sums import tree_sum
from surogate_testing.virtual import in_threads


def gradient(number: int) -> Tensor:
    return torch.randn(16, generator=torch.Generator().manual_seed(number))


def over_ranks(fabric: Fabric, value: Tensor) -> Tensor:
    received = torch.empty(fabric.world, 16)
    fabric.exchange([value] * fabric.world, received)
    out = torch.empty(16)
    tree_sum(list(received.unbind()), out)
    return out


def outer(fabric: Fabric, micro_batches: int) -> Tensor:
    """Each rank adds its own, then the ranks add."""
    share = Share.of(micro_batches, rank=fabric.rank, ranks=fabric.world, exact=True, strided=False)
    sums = torch.zeros(16)
    lanes = Lanes([sums])
    for i, number in enumerate(share.numbers):
        sums += gradient(number)
        lanes.after(share, i)
    return over_ranks(fabric, sums)


def inner(fabric: Fabric, micro_batches: int) -> Tensor:
    """The ranks add in each micro-step, then each rank adds over its micro-steps."""
    share = Share.of(micro_batches, rank=fabric.rank, ranks=fabric.world, exact=True, strided=True)
    sums = torch.zeros(16)
    lanes = Lanes([sums])
    for i, number in enumerate(share.numbers):
        sums += over_ranks(fabric, gradient(number))
        lanes.after(share, i)
    return sums


@pytest.mark.parametrize("micro_batches", [8, 16, 24, 64])
@pytest.mark.parametrize("order", [outer, inner])
def test_any_number_of_ranks_gives_the_same_bits(order, micro_batches) -> None:
    (alone,) = in_threads(1, lambda fabric: order(fabric, micro_batches))
    for world in (2, 4, 8):
        for found in in_threads(world, lambda fabric: order(fabric, micro_batches)):
            assert torch.equal(found, alone)
    assert torch.allclose(alone, torch.stack([gradient(i) for i in range(micro_batches)]).sum(0), atol=1e-5)


@pytest.mark.parametrize("micro_batches", [2, 4, 6])
def test_fewer_lanes_serve_fewer_ranks(micro_batches) -> None:
    (alone,) = in_threads(1, lambda fabric: outer(fabric, micro_batches))
    for found in in_threads(2, lambda fabric: outer(fabric, micro_batches)):
        assert torch.equal(found, alone)


def test_without_exactness_micro_steps_are_added_in_order() -> None:
    share = Share.of(8, rank=1, ranks=2, exact=False, strided=False)
    assert share.simple
    assert list(share.numbers) == [4, 5, 6, 7]
    sums = torch.ones(2)
    assert not Lanes([sums]).after(share, 3)
    assert sums.tolist() == [1, 1]


def test_shares_cover_each_micro_batch_once() -> None:
    for strided in (False, True):
        shares = [Share.of(24, rank=r, ranks=4, exact=True, strided=strided) for r in range(4)]
        assert sorted(n for s in shares for n in s.numbers) == list(range(24))


def test_two_micro_batches_on_one_rank_are_one_addition() -> None:
    """So that a run with up to two micro-batches has the bits that it had without lanes."""
    share = Share.of(2, rank=0, ranks=1, exact=True, strided=False)
    assert (share.sizes, share.leaves) == ((1, 1), 2)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 6, 8, 11, 16, 21])
@pytest.mark.parametrize("strided", [False, True])
def test_steps_of_any_length_have_the_same_bits_on_any_number_of_ranks(strided: bool, micro_batches: int) -> None:
    def work(fabric: Fabric) -> Tensor:
        share = Share.of_any(micro_batches, rank=fabric.rank, ranks=fabric.world, exact=True, strided=strided)
        sums = torch.zeros(16)
        lanes = Lanes([sums])
        lanes.begin(share)
        for i, number in enumerate(share.numbers):
            value = gradient(number) if number < micro_batches else torch.zeros(16)
            sums += over_ranks(fabric, value) if strided else value
            lanes.after(share, i)
        return sums if strided else over_ranks(fabric, sums)

    (alone,) = in_threads(1, work)
    for world in (2, 4, 8):
        for found in in_threads(world, work):
            assert torch.equal(found, alone), world
    assert torch.allclose(alone, torch.stack([gradient(i) for i in range(micro_batches)]).sum(0), atol=1e-5)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_shares_of_steps_of_any_length_are_as_equal_as_possible(world: int) -> None:
    for count in (1, 3, 5, 8, 13, 40):
        for strided in (False, True):
            shares = [Share.of_any(count, rank=r, ranks=world, exact=True, strided=strided) for r in range(world)]
            own = [[n for n in share.numbers if n < count] for share in shares]
            assert sorted(n for numbers in own for n in numbers) == list(range(count))
            assert max(map(len, own)) - min(map(len, own)) <= 1
            assert [sum(share.sizes) for share in shares] == [len(share.numbers) for share in shares]
            if strided:
                assert len({len(share.numbers) for share in shares}) == 1
