"""The plan of the ranks: places, groups and what is shared out, for every number of ranks."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from surogate_core.bundles.fabrics import Fabric
from surogate_core.mesh.axes import AXES as NAMES
from surogate_core.mesh.axes import Axes, AxisName
from surogate_testing.virtual import VirtualFabric, in_threads


def test_an_axis_divides_all_ranks_into_groups() -> None:
    axes = Axes.of(8, shard=4, context=2, expert=4)
    assert (axes.replicate, axes.shard, axes.ranks) == (2, 4, 8)
    expected = {"ranks": 8, "replicate": 2, "shard": 4, "context": 2, "rows": 4, "expert": 4, "expert_replicate": 2}
    assert {name: axes.along(name).size for name in NAMES} == expected
    for name in NAMES:
        axis = axes.along(name)
        groups = {tuple(axis.group(rank)) for rank in range(8)}
        assert sorted(rank for group in groups for rank in group) == list(range(8))
        for group in groups:
            assert [axis.place(rank) for rank in group] == list(range(axis.size))
    assert list(axes.along("replicate").group(5)) == [1, 5]
    assert list(axes.along("shard").group(5)) == [4, 5, 6, 7]
    assert list(axes.along("context").group(5)) == [4, 5]
    assert list(axes.along("rows").group(5)) == [1, 3, 5, 7]
    assert list(axes.along("expert").group(5)) == [4, 5, 6, 7]
    assert list(axes.along("expert_replicate").group(5)) == [1, 5]


def test_the_fabric_of_an_axis_connects_its_group() -> None:
    axes = Axes.of(8, shard=4, context=2)

    def work(fabric: VirtualFabric) -> dict[str, tuple[int, list[int]]]:
        def found(name: AxisName) -> tuple[int, list[int]]:
            group: Fabric = axes.along(name).of(fabric)
            mine = [-1.0] * group.world
            mine[group.rank] = float(fabric.rank)
            return group.rank, [int(rank) for rank in group.largest(mine)]

        return {name: found(name) for name in NAMES}

    for rank, found in enumerate(in_threads(8, work)):
        for name in NAMES:
            axis = axes.along(name)
            assert found[name] == (axis.place(rank), list(axis.group(rank)))


def test_one_rank_shares_out_nothing_and_keeps_the_order_of_its_level() -> None:
    axes = Axes.of(1, zero_level=3, shard_weights=True)
    assert (axes.shards, axes.shards_gradients, axes.shards_weights, axes.reduces_later) == (False,) * 4
    assert axes.reduces_each_micro_step


@pytest.mark.parametrize(
    ("level", "weights", "shares"),
    [
        (0, False, (False, False, False)),
        (0, True, (False, False, True)),
        (1, False, (True, False, False)),
        (1, True, (True, False, True)),
        (2, False, (True, True, False)),
        (3, False, (True, True, True)),
    ],
)
def test_what_several_ranks_share_out(level: int, weights: bool, shares: tuple[bool, ...]) -> None:
    for shard in (0, 2):
        axes = Axes.of(4, shard=shard, zero_level=level, shard_weights=weights)
        assert (axes.shards, axes.shards_gradients, axes.shards_weights) == shares
        assert axes.reduces_later == axes.reduces_each_micro_step == (level >= 2)
    for keys in ({"exact": True}, {"varying": True}):
        assert not Axes.of(4, zero_level=2, **keys).reduces_later


def test_the_plan_is_frozen_and_refuses_what_would_hang() -> None:
    with pytest.raises(FrozenInstanceError):
        Axes.of(4).zero_level = 2  # type: ignore[misc]
    with pytest.raises(AssertionError, match="unequally many micro-steps cannot gather together"):
        Axes.of(4, shard_weights=True, varying=True)
