"""Ranks with a GPU each: NCCL gives what virtual ranks give, eagerly and in replays of a CUDA graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from surogate_core.bundles.fabrics import Fabric
from surogate_core.launch.gpus import rotated, visible
from surogate_core.mesh.mesh import Mesh
from surogate_core.mesh.virtual import in_threads

WORLD, TURNS = 2, 3
SIZES = (1, 1000, 2**20 + 256)


class Buffers:
    """Static tensors of one size, as a graph needs them."""

    def __init__(self, size: int, world: int, device: torch.device):
        self.sent = [torch.zeros(size, device=device) for _ in range(world)]
        self.received_NK = torch.zeros(world, size, device=device)
        lengths = [size + 3 if rank == 0 else size for rank in range(world)]
        self.unequal = list(torch.zeros(sum(lengths), dtype=torch.bfloat16, device=device).split(lengths))
        self.one_only = [torch.zeros(size if rank == 0 else 0, device=device) for rank in range(world)]
        self.equal = list(torch.zeros(world * size, dtype=torch.uint8, device=device).split(size))
        self.added = torch.zeros(world * size, device=device)
        self.most = torch.zeros(size, device=device)

    def fill(self, rank: int, turn: int) -> None:
        """Values that each rank draws by itself."""
        random = torch.Generator().manual_seed(100 * turn + rank)

        def normal(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=random)

        for part in self.sent:
            part.copy_(normal(part))
        self.unequal[rank].copy_(normal(self.unequal[rank]))
        self.one_only[rank].copy_(normal(self.one_only[rank]))
        self.equal[rank].copy_(normal(self.equal[rank]).mul(64).abs().clamp(max=255))
        self.added.zero_()
        self.added.view(len(self.sent), -1)[rank].copy_(normal(self.most))
        self.most.copy_(normal(self.most).abs())
        if rank == turn % 2:
            self.most[:1].fill_(float("nan"))

    def run(self, fabric: Fabric) -> None:
        """Every collective once."""
        fabric.exchange(self.sent, self.received_NK)
        fabric.gather(self.unequal)
        fabric.gather(self.one_only)
        fabric.gather(self.equal)
        fabric.add(self.added)
        fabric.maximum(self.most.view(torch.int32))

    def bits(self) -> list[int]:
        """A checksum of each result: the weighted sum of its bytes as integers."""
        found = []
        for tensor in (self.received_NK, *self.unequal, *self.one_only, *self.equal, self.added, self.most):
            values = tensor.cpu().contiguous().view(torch.uint8).view(-1).long()
            found.append(int((values * (torch.arange(values.numel()) % 1009 + 1)).sum()))
        return found


def virtual(size: int) -> list[list[list[int]]]:
    """[rank][turn]: what each rank must have."""

    def work(fabric: Fabric) -> list[list[int]]:
        buffers, found = Buffers(size, WORLD, torch.device("cpu")), []
        for turn in range(TURNS):
            buffers.fill(fabric.rank, turn)
            buffers.run(fabric)
            found.append(buffers.bits())
        return found

    return in_threads(WORLD, work)


def rank_of_processes(store: str, rank: int, device: torch.device) -> dict[str, list[list[int]]]:
    """In a process: size → the results of each turn. On a GPU the first turn is eager, the others replay a graph."""
    mesh = Mesh(rank=rank, world=WORLD, store=dist.FileStore(store, WORLD), local_world=WORLD)
    mesh.connect(device)
    assert mesh.fabric is not None
    found: dict[str, list[list[int]]] = {}
    for size in SIZES:
        buffers = Buffers(size, WORLD, device)
        buffers.fill(rank, 0)
        buffers.run(mesh.fabric)
        found[str(size)] = [buffers.bits()]
        graph = None
        if device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                buffers.run(mesh.fabric)
        for turn in range(1, TURNS):
            buffers.fill(rank, turn)
            if graph is not None:
                graph.replay()
            else:
                buffers.run(mesh.fabric)
            found[str(size)].append(buffers.bits())
        del graph
    mesh.close()
    return found


@pytest.mark.gpu
def test_gpus_have_the_bits_of_virtual_ranks(tmp_path: Path) -> None:
    gpus = visible(os.environ)
    if len(gpus) < WORLD:
        pytest.skip("needs two GPUs")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path), str(rank), "cuda"],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": rotated(gpus, rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert not any(process.returncode for process in processes), errors
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    for size in SIZES:
        assert [each[str(size)] for each in found] == virtual(size), size


if __name__ == "__main__":
    directory, number, kind = sys.argv[1:]
    torch.set_num_threads(1)
    results = rank_of_processes(f"{directory}/store", int(number), torch.device(kind, 0))
    Path(directory, f"{number}.json").write_text(json.dumps(results))
