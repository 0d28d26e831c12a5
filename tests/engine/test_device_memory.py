"""How torch's allocator is set before an engine takes device memory."""

from __future__ import annotations

import pytest
import torch

from surogate_core.engine.device_memory import VARIABLES, grow_segments, wake_gpu


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
