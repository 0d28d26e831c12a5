"""How torch's allocator is set before an engine takes device memory, and what is free of it."""

from __future__ import annotations

import pytest
import torch

from surogate_core.engine.device_memory import VARIABLES, free_memory, grow_segments, wake_gpu
from surogate_core.engine.planning.prediction import CUDA_CONTEXT


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The setting that torch received."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return told


def test_segments_grow(given: list[str]) -> None:
    grow_segments()
    assert given == ["expandable_segments:True"]


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_set_stays(name: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    grow_segments()
    assert given == []


@pytest.mark.gpu
def test_torch_takes_the_setting() -> None:
    grow_segments()
    assert torch.zeros(4, device="cuda").sum().item() == 0


@pytest.mark.parametrize("there", [False, True])
def test_waking_a_gpu_raises_nothing(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[object] = []

    def zeros(*shape: int, device: str) -> None:
        touched.append(device)
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch, "zeros", zeros)
    thread = wake_gpu()
    thread.join()
    assert touched == ["cuda"] * there
    assert not thread.daemon


def test_what_graphs_work_in_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 40},
        {"device": 0, "segment_pool_id": (0, 7), "total_size": 300, "allocated_size": 10},
        {"device": 1, "segment_pool_id": (0, 8), "total_size": 500, "allocated_size": 0},
    ]
    found = {
        "is_available": lambda: True,
        "mem_get_info": lambda device: (1000, 2000),
        "memory_reserved": lambda device: 400,
        "memory_allocated": lambda device: 50,
        "get_per_process_memory_fraction": lambda device: 1.0,
        "memory_snapshot": lambda: segments,
    }
    for name, function in found.items():
        monkeypatch.setattr(torch.cuda, name, function)
    assert free_memory(torch.device("cuda", 0)) == CUDA_CONTEXT + 1000 + 60

    def no_snapshot() -> None:
        raise RuntimeError("not meaningful for this allocator")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", no_snapshot)
    assert free_memory(torch.device("cuda", 0)) == CUDA_CONTEXT + 1000 + 350


@pytest.mark.gpu
def test_what_a_captured_graph_works_in_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    device, x = torch.device("cuda"), torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    # The other processes of a test run take and free memory meanwhile.
    found = torch.cuda.mem_get_info(device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: found)
    before, graph = free_memory(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Freed within the graph, so torch does not count it as allocated.
        y = (x.repeat(64) * 2).sum()
    after = free_memory(device)
    assert before is not None
    assert after is not None
    assert torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) >= 64 * x.nbytes
    assert after - before < x.nbytes
    graph.replay()
    assert y.item() == 2 * 64 * x.numel()
