"""What the processes of a run need to reach each other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import RunConfig
from surogate_core.errors import ConfigError
from surogate_core.mesh.mesh import Mesh
from surogate_core.plugins.registry import Registry
from surogate_core.setup.links import check_fabric, choose_fabric, neighbours, no_peer_access, slow_links


def test_the_named_fabric_is_built_with_its_options(installed: Registry) -> None:
    mesh = of_two(rank=1)
    choose_fabric(configured(installed, "fabric=gloo"), installed, mesh)
    assert type(mesh._built).__name__ == "GroupFabric"
    mesh = of_two(rank=1)
    choose_fabric(configured(installed), installed, mesh)
    assert type(mesh._built).__name__ == "Auto"


def test_a_fabric_that_cannot_connect_the_ranks_is_refused(
    installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(installed, "fabric=copy_engines")
    for ranks in (1, 2):
        with pytest.raises(ConfigError, match=r"copy_engines cannot connect processes on the CPU here\. Fix: .*auto"):
            choose_fabric(config, installed, of_two(local_world=ranks))
    # One that could connect them if they were neighbours.
    found: Any = installed.bundles("fabric")
    near = replace(found["copy_engines"].bundle, supports=lambda kind, near, world: kind == "cpu" and near > 1)
    monkeypatch.setitem(found, "copy_engines", replace(found["copy_engines"], bundle=near))
    with pytest.raises(ConfigError, match="cannot connect processes on the CPU of these machines: 1 on each"):
        choose_fabric(config, installed, of_two(local_world=1))
    unequal = Mesh(
        rank=0, world=3, local_world=2, store=dist.HashStore(), swap=lambda _: [["a", 2], ["a", 2], ["b", 1]]
    )
    with pytest.raises(ConfigError, match="of these machines: not equally many on each, or not neighbouring ranks"):
        choose_fabric(config, installed, unequal)


def test_ranks_of_one_machine_are_refused_before_the_run_begins(installed: Registry) -> None:
    config = configured(installed, "fabric=copy_engines")
    alone = Mesh(rank=0, world=2, local_world=2, store=dist.HashStore())  # the other one may not be there yet
    with pytest.raises(ConfigError, match="cannot connect processes on the CPU here"):
        check_fabric(config, installed, alone)
    check_fabric(config, installed, Mesh(rank=0, world=2, local_world=1, store=dist.HashStore()))
    check_fabric(config, installed, Mesh())


def test_auto_takes_a_fabric_with_groups_where_gpus_exchange_values(
    installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Any = installed.bundles("fabric")
    first = replace(found["gloo"].bundle, name="first", priority=99, groups=False)
    monkeypatch.setitem(found, "first", replace(found["gloo"], bundle=first))
    for keys, chosen in (([], "first"), (["context_parallel_size=2"], "gloo"), (["ep_size=2"], "gloo")):
        mesh: Any = of_two()
        choose_fabric(configured(installed, *keys), installed, mesh)
        assert mesh._built._chosen.name == chosen


@pytest.mark.parametrize(
    ("counts", "keys", "node"),
    [
        ([2, 2, 2, 2], [], 2),
        ([4, 4, 4, 4], [], 0),
        ([1, 1, 1, 1], [], 0),
        ([3, 3, 3, 1], [], 0),
        ([3, 3, 3, 3], [], 0),
        ([2, 2, 2, 2], ["hierarchical_reduction=false"], 0),
    ],
    ids=str,
)
def test_machines_are_known_if_they_have_equally_many_ranks(
    counts: list[int], keys: list[str], node: int, installed: Registry
) -> None:
    config = configured(installed, *keys)
    for rank, count in enumerate(counts):
        mesh = Mesh(rank=rank, world=4, local_world=count, swap=lambda value: [["here", n] for n in counts])
        choose_fabric(config, installed, mesh)
        assert mesh.node == node
        assert mesh.near == (0 if 3 in counts else counts[0]), "which does not depend on the stages"


def test_ranks_that_are_dealt_out_to_the_machines_in_turn_have_one_stage() -> None:
    """As by `srun --distribution=cyclic`: neighbours are on different machines."""
    for names, near in (("abab", 0), ("aabb", 2)):
        told = [[name, 2] for name in names]
        mesh = Mesh(rank=0, world=4, local_world=2, swap=partial(_told, told))
        assert neighbours(mesh) == near


def of_two(*, rank: int = 0, local_world: int = 2) -> Mesh:
    """One of two ranks; the other one says the same."""
    store = dist.HashStore()
    return Mesh(rank=rank, world=2, local_world=local_world, store=store, swap=lambda value: [value, value])


def _told(values: list[Any], value: Any) -> list[Any]:
    return values


def test_one_rank_asks_for_no_fabric(installed: Registry) -> None:
    mesh = Mesh()
    choose_fabric(configured(installed, "fabric=copy_engines"), installed, mesh)
    assert mesh._built is None


def configured(registry: Registry, *overrides: str) -> RunConfig:
    return load_run_config(["model=qwen3", "device=cpu", "gpus=2", *overrides], registry=registry)


def test_gpus_without_peer_access_are_named_once() -> None:
    assert no_peer_access([[], []]) == []
    (note,) = no_peer_access([[1], [0]])
    assert note.startswith("The GPUs of ranks 0 and 1 have no peer access")
    (note,) = no_peer_access([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]])
    assert "ranks 0 and 1, 0 and 2, 0 and 3 and 3 more pairs have" in note


def test_the_order_of_the_visible_gpus_is_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 of three on a machine with four GPUs sees 2, 3, 0, 1, and GPU 3 is not in the run."""
    asked = []

    def reaches(device: torch.device, other: int) -> bool:
        asked.append(other)
        return other != 3

    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", reaches)
    mesh = Mesh(rank=2, world=3, local_world=3, swap=lambda value: [[], [], value])
    (note,) = slow_links(mesh, torch.device("cuda", 0))
    assert asked == [2, 3]
    assert note.startswith("The GPUs of ranks 1 and 2 have no peer access")
    in_turn = Mesh(rank=2, world=6, local_world=3, near=0, swap=lambda value: [value])
    assert slow_links(in_turn, torch.device("cuda", 0)) == [], "ranks 0, 2 and 4 are on this machine, and not 3 to 5"
