"""One of four ranks on two GPUs: groups of `PeerFabric` over memory that processes really share.

``python peer_groups.py RANK NEAR STORE``. NCCL refuses two ranks on one GPU, so gloo stands in for it. Only groups
inside a machine of NEAR ranks are used, which need no NCCL. The exit status is 0 if every value has arrived.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from surogate_core.bundles import Fabric
from surogate_core.mesh.mesh import Mesh
from surogate_core.mesh.peers import PeerFabric

WORLD, ELEMENTS = 4, 2**20
DEVICE = torch.device("cuda", 0)


def connected(rank: int, near: int, store: str) -> tuple[Mesh, Tensor]:
    """The mesh, and memory that others write to."""
    start = dist.init_process_group

    def with_gloo(backend: str, **options: object) -> None:
        start("cpu:gloo,cuda:gloo", **{**options, "device_id": None})  # type: ignore[arg-type]

    dist.init_process_group = with_gloo  # type: ignore[assignment]
    mesh = Mesh(rank=rank, world=WORLD, store=dist.FileStore(store, WORLD), local_world=near, near=near)
    mesh.choose(PeerFabric, DEVICE)
    memory = mesh.zeros(WORLD * ELEMENTS, torch.float32, DEVICE)
    mesh.connect(DEVICE)
    return mesh, memory


def checked(group: Fabric, rank: int, members: Sequence[int], memory: Tensor) -> None:
    """Exchange and gather new values, eagerly and in replays of a CUDA graph."""
    rows = memory[: group.world * ELEMENTS].view(group.world, ELEMENTS)
    exchanged, gathered = torch.empty_like(rows), torch.empty_like(rows)
    own, turn = torch.empty(ELEMENTS, device=DEVICE), torch.zeros((), device=DEVICE)

    def work() -> None:
        turn.add_(1)
        own.fill_(1000.0 * rank).add_(turn)
        group.exchange([own] * group.world, rows)
        exchanged.copy_(rows)
        rows.fill_(-1)
        rows[group.rank].copy_(own)
        group.gather(list(rows))
        gathered.copy_(rows)

    def right(turns: int) -> None:
        torch.cuda.synchronize()
        for place, member in enumerate(members):
            expected = 1000.0 * member + turns
            assert gathered[place].eq(expected).all(), f"rank {rank} has gathered something else from {member}"
            arrived = member == rank or bool(exchanged[place].eq(expected).all())
            assert arrived, f"rank {rank} has received something else from {member}"

    _in_graph(work, right)


def _in_graph(work: Callable[[], None], right: Callable[[int], None]) -> None:
    for turns in (1, 2, 3):
        work()
        right(turns)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        work()
    for _ in range(20):
        graph.replay()
    right(24)


def main(rank: int, near: int, store: str) -> None:
    """Check the groups that are inside a machine."""
    mesh, memory = connected(rank, near, store)
    fabric = mesh.fabric
    assert fabric is not None
    inside, across = fabric.within(2), fabric.across(2)
    groups: list[tuple[Fabric, list[int]]] = [(inside, [rank // 2 * 2, rank // 2 * 2 + 1])]
    if near == WORLD:
        groups += [(across, [rank % 2, rank % 2 + 2]), (fabric, list(range(WORLD)))]
    for group, members in groups:
        checked(group, rank, members, memory)
    mesh.gather(None)
    os._exit(0)  # gloo's groups would wait for each other


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
