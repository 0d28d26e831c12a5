"""Memory and connections of a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surogate_core.errors import MachineError
from surogate_core.mesh import groups, peers
from surogate_core.mesh.mesh import CalledOff, Mesh


class _NoPeers:
    """Memory that no other process can map."""

    nbytes = 0

    def __init__(self, *a: Any, **b: Any):
        self.asked = 0

    def zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        self.asked += 1
        return torch.zeros(elements, dtype=dtype)

    def share(self) -> None:
        raise MachineError("mapping another GPU's memory failed: CUDA error 217")

    def close(self) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU, whose tensors are the CPU's."""
    plain = torch.zeros
    monkeypatch.setattr(peers, "PeerMemory", _NoPeers)
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **b: plain(*a, **b))
    return torch.device("cuda")


def test_without_access_to_each_other_the_run_goes_on_and_says_so(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        def close(self) -> None:
            pass

    found = Group()
    monkeypatch.setattr(groups.GroupFabric, "connect", lambda *a, **b: found)
    mesh = Mesh(rank=0, world=2, local_world=2, store=dist.HashStore(), swap=lambda value: [value, value])
    mesh.zeros(4, torch.float32, cuda)
    memory: Any = mesh._peer_memory
    assert memory.asked == 1
    mesh.connect(cuda)
    assert mesh.fabric is found
    assert "NCCL moves all data, slower: mapping another GPU's memory failed" in mesh.note
    mesh.zeros(4, torch.float32, cuda)  # what is allocated after that, such as a store's buffers
    assert memory.asked == 1
    mesh.close()


def test_ranks_of_several_machines_share_no_memory(cuda: torch.device) -> None:
    mesh = Mesh(rank=0, world=4, local_world=2, store=dist.HashStore())
    assert mesh.zeros(3, torch.float32, cuda).tolist() == [0, 0, 0]
    assert mesh._peer_memory is None


def test_what_waits_for_rank_0_is_called_off() -> None:
    told: set[str] = set()
    store: Any = SimpleNamespace(set=lambda key, value: told.add(key), check=lambda keys: told >= set(keys))
    first, second = (Mesh(rank=rank, world=2, store=store) for rank in range(2))
    with first.first("data"):
        assert not told
    second.wait_for("data")
    first.call_off()
    second.wait_for("data")
    for wait in (lambda: second.wait_for("compiled"), lambda: second.gather(1)):
        with pytest.raises(CalledOff):
            wait()
