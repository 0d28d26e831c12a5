"""Ranks that are processes: gloo gives what virtual ranks give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from surogate_core.bundles.fabrics import Fabric, FabricContext
from surogate_core.engine.ranks.owned import Owned, Within
from surogate_core.engine.ranks.reduce import reduce_parts
from surogate_core.engine.ranks.sharded_gradients import ShardedGradients
from surogate_core.engine.ranks.sharded_weights import ShardedWeights
from surogate_core.engine.ranks.stages import Stages
from surogate_core.mesh import groups
from surogate_core.mesh.groups import GroupFabric
from surogate_testing.virtual import in_threads

CPU = torch.device("cpu")
WORLD = 3


def context(store: dist.Store, rank: int, world: int, device: torch.device) -> FabricContext:
    return FabricContext(rank=rank, world=world, near=world, device=device, store=store, gather=lambda value: [value])


def _collectives(fabric: Fabric) -> list[Tensor]:
    """The results of all collectives, with unequal and empty parts, and of the stores that use them."""
    drawn = torch.Generator().manual_seed(fabric.rank)
    flat = torch.randn(768 + 256, generator=drawn)
    gathered = flat.clone()
    fabric.gather(gathered.split([768, 256, 0]))
    codes = torch.full((WORLD, 5), fabric.rank, dtype=torch.uint8)
    fabric.gather(list(codes.unbind()))
    received = torch.empty(WORLD, 4)
    fabric.exchange(list(flat[: 4 * WORLD].split(4)), received)
    added, largest = torch.zeros(WORLD), torch.tensor([1, fabric.rank, -fabric.rank], dtype=torch.int32)
    added[fabric.rank] = 1.5
    fabric.add(added)
    fabric.maximum(largest)
    reduced = flat.clone()
    parts = reduced.split([512, 512, 0])
    reduce_parts(fabric, parts, torch.empty(WORLD * 256))
    return [gathered, codes, received, added, largest, parts[fabric.rank], *_stores(fabric)]


def _stores(fabric: Fabric) -> list[Tensor]:
    """What the stores of shares hand out and keep."""
    frozen, trained = ShardedWeights(Stages.over(fabric), CPU), torch.Generator().manual_seed(7)
    weights = [torch.randn(30, 30, generator=trained).bfloat16(), torch.randn(9, generator=trained)]
    frozen.put("layer 0", weights)
    found = [t.clone() for t in frozen.fetch("layer 0")]
    assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))
    sums = ShardedGradients(Stages.over(fabric), CPU)
    owners = [(0, 512), (512, 768), (768, 768)]
    shard = torch.empty(owners[fabric.rank][1] - owners[fabric.rank][0])
    sums.put_owned("layer 0", Owned(owners=owners, shard=shard))
    sums.put("layer 0", [Within("layer 0", 0, (20, 30))])
    for first in (True, False):
        sums.begin(first=first, last=True)
        sums.fetch("layer 0")[0].add_(torch.arange(600.0).view(20, 30) * (fabric.rank + 1))
        sums.release("layer 0")
    sums.finish()
    return [*found, shard]


def test_parts_are_one_tensor_only_within_one_allocation() -> None:
    whole = torch.arange(8, dtype=torch.float32)
    found = groups._as_one(whole.split(4))
    assert found is not None
    assert torch.equal(found, whole)
    memory = bytearray(32)
    apart = [torch.frombuffer(memory, dtype=torch.float32, count=4, offset=offset) for offset in (0, 16)]
    assert apart[1].data_ptr() == apart[0].data_ptr() + apart[0].nbytes
    assert groups._as_one(apart) is None


def test_nccl_registers_no_buffers_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user wants it: with torch's expandable segments a replay hangs."""
    seen = []
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **b: seen.append(os.environ.get("NCCL_GRAPH_REGISTER")))
    monkeypatch.setattr(groups, "_greet", lambda device: None)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    for device, given in (("cpu", None), ("cuda", None), ("cuda", "1")):
        if given is not None:
            monkeypatch.setenv("NCCL_GRAPH_REGISTER", given)
        GroupFabric(context(dist.HashStore(), 0, 2, torch.device(device))).connect()
    assert seen == [None, "0", "1"]


def test_groups_of_groups_have_the_right_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 ranks: 2 machines of 4, in which 2 ranks share out tensors. All ranks open the same groups in one order."""
    opened: dict[int, list[list[int]]] = {rank: [] for rank in range(8)}
    found: dict[int, list[tuple[list[int], int]]] = {}
    for rank in range(8):
        monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, rank=rank: opened[rank].append(ranks))
        monkeypatch.setattr(dist, "all_reduce", lambda values, op=None, group=None: None)
        fabric = GroupFabric(context(dist.HashStore(), rank, 8, CPU))
        groups = [fabric.within(2), fabric.within(4).across(2), fabric.within(8).across(4)]
        assert fabric.within(8) is fabric.across(1) is fabric
        found[rank] = [(group._ranks, group.rank) for group in groups if isinstance(group, GroupFabric)]
        assert [group.world for group in groups] == [2, 2, 2]
    assert found[6] == [([6, 7], 0), ([4, 6], 1), ([2, 6], 1)]
    assert found[1] == [([0, 1], 1), ([1, 3], 0), ([1, 5], 0)]
    assert all(opened[rank] == opened[0] for rank in range(8))


@pytest.mark.slow
def test_processes_over_gloo_have_the_bits_of_virtual_ranks(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import test_groups as t\n"
        "from torch.distributed import FileStore\n"
        "rank, world, place = int(sys.argv[2]), t.WORLD, sys.argv[3]\n"
        "fabric = t.GroupFabric(t.context(FileStore(place + '/store', world), rank, world, t.CPU))\n"
        "fabric.connect()\n"
        "torch.save(t._collectives(fabric), f'{place}/{rank}')\n"
        "fabric.close()\n"
    )
    here = str(Path(__file__).parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, here, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(WORLD)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert not any(process.returncode for process in processes), errors
    for rank, expected in enumerate(in_threads(WORLD, _collectives)):
        found = torch.load(tmp_path / str(rank), weights_only=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), rank
