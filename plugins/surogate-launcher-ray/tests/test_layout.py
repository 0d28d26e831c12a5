"""Which machine runs which ranks."""

from __future__ import annotations

from typing import Any

import pytest
from surogate_launcher_ray.layout import Machine, layout
from surogate_launcher_ray.options import RayOptions

from surogate_core.plugin import ConfigError, MachineError


def machines(*gpus: int, cpus: float = 8.0) -> list[Machine]:
    return [Machine(id=f"n{i}", address=f"10.0.0.{i}", cpus=cpus, gpus=count) for i, count in enumerate(gpus)]


def split(gpus: int, device: str, found: list[Machine], **options: Any) -> tuple[int, int, bool]:
    result = layout(RayOptions(**options), gpus, device, found)
    assert result.world == result.nodes * result.per_node
    return result.nodes, result.per_node, result.on_gpus


@pytest.mark.parametrize("wanted", [0, 1, 16])
def test_all_gpus_of_the_machines(wanted: int) -> None:
    assert split(wanted, "auto", machines(8, 8), num_nodes=2) == (2, 8, True)


def test_some_gpus_of_each_machine() -> None:
    assert split(1, "auto", machines(8, 8), num_nodes=2, gpus_per_node=4) == (2, 4, True)
    assert split(4, "cuda", machines(8, 8), num_nodes=2) == (2, 2, True)
    # The machine without GPUs, such as the head of the cluster, takes no part.
    assert split(0, "auto", machines(0, 4, 4), num_nodes=2) == (2, 4, True)


def test_ranks_on_the_cpu_are_divided_among_the_machines() -> None:
    assert split(1, "cpu", machines(8, 8), num_nodes=2) == (2, 1, False)
    assert split(4, "cpu", machines(0, 0), num_nodes=2) == (2, 2, False)
    assert split(2, "auto", machines(0)) == (1, 2, False)


def test_a_place_has_a_cpu_for_the_supervisor_and_the_gpus_of_the_ranks() -> None:
    assert layout(RayOptions(num_nodes=2), 0, "auto", machines(8, 8)).bundle == {"CPU": 1.0, "GPU": 8.0}
    assert layout(RayOptions(), 3, "cpu", machines(8)).bundle == {"CPU": 1.0}


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (3, {"num_nodes": 2}, r"gpus: 3 ranks cannot be divided equally among 2 machines .*Fix: gpus=2"),
        (3, {"num_nodes": 4}, r"Fix: gpus=4"),
        (8, {"num_nodes": 2, "gpus_per_node": 2}, r"gpus: 8 GPUs, but 2 machines .* have 4\. Fix: gpus=4, or leave it"),
    ],
)
def test_numbers_that_contradict_each_other(gpus: int, options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split(gpus, "cpu", machines(8, 8), **options)


@pytest.mark.parametrize(
    ("found", "options", "message"),
    [
        (machines(8, 4), {"num_nodes": 2}, r"different numbers of GPUs: 10\.0\.0\.0 has 8 .* Fix: .*gpus_per_node=4"),
        (machines(8), {"num_nodes": 2}, r"launcher\.num_nodes=2: the Ray cluster has 1 machine with .*num_nodes=1"),
        (machines(4, 4), {"num_nodes": 2, "gpus_per_node": 8}, r"has 0 machines with 8 GPUs and a CPU"),
        (machines(0, cpus=0.0), {}, r"has 0 machines with a CPU: 10\.0\.0\.0 has 0 CPUs and 0 GPUs"),
        ([], {}, r"has 0 machines with a CPU: it has no machine"),
    ],
)
def test_clusters_that_have_too_little(found: list[Machine], options: dict[str, int], message: str) -> None:
    with pytest.raises(MachineError, match=message):
        split(0, "auto", found, **options)


def test_cuda_without_a_gpu_in_the_cluster() -> None:
    with pytest.raises(MachineError, match="has 0 machines with 1 GPU and a CPU"):
        split(0, "cuda", machines(0, 0))


def test_machines_are_sorted_by_address_and_the_dead_are_left_out() -> None:
    def node(name: str, address: str, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive, "Resources": resources}

    nodes = [
        node("c", "10.0.0.10", CPU=4.0, GPU=2.0),
        node("e", "gpu01.example"),
        node("b", "10.0.0.9", CPU=4.0),
        node("d", "10.0.0.8", alive=False, CPU=4.0),
        node("a", "10.0.0.9", CPU=4.0),
    ]
    found = Machine.of(nodes)
    assert [machine.id for machine in found] == ["a", "b", "c", "e"]
    assert found[2] == Machine(id="c", address="10.0.0.10", cpus=4.0, gpus=2)
    assert (found[3].cpus, found[3].gpus) == (0.0, 0)


def test_a_restart_takes_the_machines_that_are_left() -> None:
    full = layout(RayOptions(num_nodes=4), 0, "auto", machines(2, 2, 2, 2))

    def left(count: int, micro_batches: int | None, least: int = 1, shard: int = 0, context: int = 1) -> int:
        here = machines(0, *[2] * count)
        found = full.on_those_left(here, micro_batches, least=least, shard=shard, context=context)
        return found.nodes if found is not None else 0

    assert full.on_those_left(machines(2, 2, 2, 2, 2), 8, least=1) is full
    # 3 machines have 6 ranks, which cannot share 8 micro-batches equally; 2 machines can.
    assert [left(3, 8), left(3, 24), left(2, 8), left(1, 8)] == [2, 3, 2, 1]
    assert [left(3, 8, least=3), left(1, 7), left(0, 8), left(2, 0)] == [0, 0, 0, 0]
    # Replicas of 4 ranks need 2 machines; one of 8 ranks needs all 4.
    assert [left(3, 24, shard=2), left(3, 24, shard=4), left(1, 8, shard=4), left(3, 24, shard=8)] == [3, 2, 0, 0]
    # Two ranks that share rows are one group, so 3 machines have 3 of them; four need 2 machines.
    assert [left(3, 9, context=2), left(3, 8, context=4), left(1, 8, context=4), left(3, 8, context=2)] == [3, 2, 0, 2]
    assert [left(3, None), left(1, None), left(3, None, shard=4)] == [3, 1, 2], "where the number varies"
    alone = layout(RayOptions(num_nodes=2), 0, "auto", machines(1, 1)).on_those_left(machines(1), 4, least=1, shard=2)
    assert alone is not None, "one rank shares out nothing"
