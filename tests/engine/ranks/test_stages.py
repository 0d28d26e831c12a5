"""Sums and gathers in stages: the bits of one tree over all ranks, whoever owns which part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from surogate_core.bundles.fabrics import Fabric
from surogate_core.engine.ranks.stages import Stages, sizes_of
from surogate_core.errors import MachineError
from surogate_core.kernels.sums import tree_sum
from surogate_testing.virtual import VirtualFabric, in_threads

ELEMENTS = 1100


def _values(rank: int, elements: int = ELEMENTS) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank))


def _total(world: int) -> Tensor:
    total = torch.empty(ELEMENTS)
    tree_sum([_values(rank) for rank in range(world)], total)
    return total


@pytest.mark.parametrize(
    ("ranks", "node", "shard", "sizes"),
    [
        (1, 0, 0, ()),
        (8, 0, 0, (8,)),
        (8, 8, 0, (8,)),
        (8, 1, 0, (8,)),
        (8, 2, 0, (2, 4)),
        (8, 0, 2, (2, 4)),
        (8, 4, 4, (4, 2)),
        (16, 8, 4, (4, 2, 2)),
        (16, 4, 8, (4, 2, 2)),
        (12, 6, 4, (4, 3)),
        (1000, 8, 0, (8, 125)),
    ],
)
def test_stages_are_within_shards_and_machines(ranks: int, node: int, shard: int, sizes: Sequence[int]) -> None:
    assert sizes_of(ranks, node=node, shard=shard) == sizes


WORLDS = [(4, 0, 0), (4, 2, 0), (8, 2, 0), (8, 4, 0), (4, 0, 2), (8, 2, 2), (8, 4, 2), (8, 2, 4), (8, 2, 1), (1, 0, 0)]


@pytest.mark.parametrize(("world", "node", "shard"), WORLDS)
def test_every_part_has_the_bits_of_one_tree_over_all_ranks(world: int, node: int, shard: int) -> None:
    parts = shard or world
    expected = _total(world)

    def work(fabric: VirtualFabric) -> None:
        stages = Stages(fabric.mesh(node), shard=shard)
        stages.connect()
        for each in (-(-ELEMENTS // parts), 304, ELEMENTS):
            if each * parts < ELEMENTS:
                continue
            start, stop = (min((stages.own + more) * each, ELEMENTS) for more in (0, 1))
            for apart in (False, True):
                values = _values(fabric.rank)
                out = torch.full((stop - start,), float("nan")) if apart else None
                stages.reduce(values, each, torch.empty(stages.staging_elements(each)), out=out)
                found = values[start:stop] if out is None else out
                assert torch.equal(found, expected[start:stop]), each
                values[start:stop].copy_(found)
                stages.gather(values, each)
                assert torch.equal(values, expected), each

    in_threads(world, work)


def test_tensors_of_everyone_have_a_part_for_each_rank() -> None:
    def work(fabric: VirtualFabric) -> int:
        stages = Stages(fabric.mesh(2), shard=2)
        stages.connect()
        everyone, each = stages.everyone(), ELEMENTS // 8 + 1
        values = _values(fabric.rank)
        everyone.reduce(values, each, torch.empty(everyone.staging_elements(each)))
        everyone.gather(values, each)
        assert torch.equal(values, _total(8))
        assert everyone.everyone() is everyone
        return everyone.own

    # Both ranks of a machine first halve the tensor; the four machines share out each half.
    assert in_threads(8, work) == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(("node", "shard"), [(0, 0), (2, 0), (2, 2), (2, 4), (4, 2)])
def test_parts_of_any_length_are_gathered_within_each_replica(node: int, shard: int) -> None:
    def work(fabric: VirtualFabric) -> None:
        stages = Stages(fabric.mesh(node), shard=shard)
        stages.connect()
        parts = [torch.zeros(8 - part) for part in range(stages.parts)]
        parts[stages.own].fill_(10 * stages.replica + stages.own)
        stages.gather_apart(parts)
        assert [part.unique().item() for part in parts] == [10 * stages.replica + p for p in range(stages.parts)]
        owners = stages.by_part([(rank, stages.part_of(rank)) for rank in range(8)])
        assert [part for _, part in owners] == list(range(stages.parts))
        assert all(rank < stages.parts for rank, _ in owners)

    in_threads(8, work)


def test_each_group_is_opened_once() -> None:
    """Every group of NCCL has memory of its own."""

    class Watched(VirtualFabric):
        def within(self, size: int) -> Fabric:
            opened.append(size)
            return super().within(size)

    opened: list[int] = []

    def work(fabric: VirtualFabric) -> None:
        stages = Stages(Watched(fabric._ranks, fabric.rank).mesh(2), shard=4)
        stages.connect()
        assert stages._group is not None
        assert stages._group.world == 4

    in_threads(8, work)
    assert sorted(opened) == [2] * 8 + [4] * 8


class Plain(VirtualFabric):
    """A fabric that has no groups."""

    def within(self, size: int) -> Fabric:
        raise NotImplementedError

    def across(self, size: int) -> Fabric:
        raise NotImplementedError


def test_a_fabric_without_groups_makes_its_sums_in_one_stage() -> None:
    def work(fabric: VirtualFabric) -> None:
        mesh = Plain(fabric._ranks, fabric.rank).mesh(2)
        stages, values, each = Stages(mesh), _values(fabric.rank), ELEMENTS // 4
        stages.connect()
        stages.reduce(values, each, torch.empty(stages.staging_elements(each)))
        stages.gather(values, each)
        assert torch.equal(values, _total(4))
        with pytest.raises(MachineError, match="connects all GPUs alone, and dp_shard_size needs groups"):
            Stages(mesh, shard=2).connect()

    in_threads(4, work)


def test_between_machines_each_rank_sends_its_part_of_the_sum_of_its_machine() -> None:
    """Elements that cross: 4 machines of 2; each rank sends three quarters of a half."""
    crossing: list[int] = []

    class Watched(VirtualFabric):
        def within(self, size: int) -> Fabric:
            return VirtualFabric.within(self, size)

        def across(self, size: int) -> Fabric:
            group, rank = self.rank % size, self.rank // size
            return Counting(self._ranks.groups("across", self.world // size)[group], rank)

    class Counting(VirtualFabric):
        def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
            crossing.append(sum(part.numel() for r, part in enumerate(parts) if r != self.rank))
            super().exchange(parts, received_NK)

    def work(fabric: VirtualFabric) -> None:
        stages = Stages(Watched(fabric._ranks, fabric.rank).mesh(2))
        stages.connect()
        stages.reduce(torch.ones(800), 100, torch.empty(stages.staging_elements(100)))

    in_threads(8, work)
    assert crossing == [300] * 8
