"""The collectives of virtual ranks, and sums whose bits do not depend on the number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.plugin import bundles
from surogate_core.service.engine import lanes_of
from surogate_core.service.kernels import tree_sum
from surogate_testing.virtual import in_threads


def test_exchange_sends_part_r_to_rank_r() -> None:
    def work(fabric: bundles.Fabric) -> list[list[float]]:
        received = torch.zeros(4, 2)
        fabric.exchange([torch.full((2,), 10.0 * fabric.rank + r) for r in range(4)], received)
        return received.tolist()

    found = in_threads(4, work)
    assert found[2] == [[2.0, 2.0], [12.0, 12.0], [22.0, 22.0], [32.0, 32.0]]


def test_two_ranks_may_exchange_any_lengths() -> None:
    def work(fabric: bundles.Fabric) -> list[list[float]]:
        sent = [torch.full(((fabric.rank + r) % 3,), 10.0 * fabric.rank + r) for r in range(4)]
        received = [torch.zeros((fabric.rank + r) % 3) for r in range(4)]
        fabric.exchange_unequal(sent, received)
        return [part.tolist() for part in received]

    assert in_threads(4, work)[2] == [[2.0, 2.0], [], [22.0], [32.0, 32.0]]


def test_gather_fills_unequal_parts_in_place() -> None:
    def work(fabric: bundles.Fabric) -> list[float]:
        flat = torch.zeros(5)
        parts = flat.split([3, 2, 0])
        parts[fabric.rank].fill_(fabric.rank + 1)
        fabric.gather(parts)
        return flat.tolist()

    assert in_threads(3, work) == [[1.0, 1.0, 1.0, 2.0, 2.0]] * 3


def test_the_bits_of_infinity_and_nan_survive_the_maximum() -> None:
    """As int32, patterns of values that are not negative keep their order, and NaN is above infinity."""

    def work(fabric: bundles.Fabric) -> list[float]:
        values = torch.tensor([1.0, 2.0, float("nan")] if fabric.rank else [3.0, float("inf"), 1.0])
        fabric.maximum(values.view(torch.int32))
        return values.tolist()

    for found in in_threads(2, work):
        assert found[:2] == [3.0, float("inf")]
        assert found[2] != found[2]


def test_an_error_of_a_rank_is_raised_and_frees_the_others() -> None:
    def work(fabric: bundles.Fabric) -> None:
        if fabric.rank == 1:
            raise ValueError("rank 1 alone")
        fabric.add(torch.zeros(1))

    with pytest.raises(ValueError, match="rank 1 alone"):
        in_threads(2, work)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_tree_over_lanes_has_the_same_bits_on_any_number_of_ranks(world: int) -> None:
    lanes = [torch.randn(64, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    whole = torch.empty(64)
    tree_sum([lane.clone() for lane in lanes], whole)
    plain = torch.stack(lanes).sum(0)
    assert not torch.equal(whole, plain) or world > 1  # the order matters for these values

    def work(fabric: bundles.Fabric) -> Tensor:
        share = 8 // world
        mine = torch.empty(64)
        tree_sum([lane.clone() for lane in lanes[fabric.rank * share : (fabric.rank + 1) * share]], mine)
        received = torch.empty(world, 64)
        fabric.exchange([mine] * world, received)
        out = torch.empty(64)
        tree_sum(list(received.unbind()), out)
        return out

    for found in in_threads(world, work):
        assert torch.equal(found, whole)


def test_sums_of_three_are_in_order() -> None:
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    out = torch.empty(1)
    tree_sum([part.clone() for part in parts], out)
    assert torch.equal(out, (parts[0] + parts[1]) + parts[2])


@pytest.mark.parametrize(("micro_batches", "lanes"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 8), (16, 8), (24, 8)])
def test_lanes(micro_batches: int, lanes: int) -> None:
    assert lanes_of(micro_batches) == lanes


def test_the_largest_of_numbers_on_the_host() -> None:
    assert in_threads(2, lambda fabric: fabric.largest([fabric.rank, -fabric.rank])) == [[1, 0], [1, 0]]
