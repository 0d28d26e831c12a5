"""Ranks that share a TCPStore, as under torchrun; here they are threads of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from surogate_core.mesh.mesh import Mesh


@contextmanager
def tcp_meshes(count: int) -> Iterator[list[Mesh]]:
    """The meshes of ranks that take each other for machines."""
    from torch.distributed import TCPStore

    first = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
    others = [
        TCPStore("127.0.0.1", first.port, count, is_master=False, wait_for_workers=False) for _ in range(count - 1)
    ]
    yield [Mesh(rank=rank, world=count, store=store, local_world=1) for rank, store in enumerate([first, *others])]
