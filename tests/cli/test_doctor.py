"""What the doctor says about several GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_core.cli.doctor import _together


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Three GPUs, of which 0 and 1 reach each other."""
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: {a, b} == {0, 1})
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 30, 7))
    return [{"model": "H200"} for _ in range(3)]


def test_links_and_models_of_several_gpus(three: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _together(three) == {
        "NCCL": "2.30.7",
        "peer access": "all but 0 and 2, 1 and 2; without it data goes through host memory, which is slower",
        "models": "H200",
    }
    assert _together(three[:2])["peer access"] == "all"
    assert _together([three[1], {"model": "L4"}])["models"] == "H200, L4: equal bits are not promised"
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert _together(three)["NCCL"] == "none: only gpus=1 can run"


def test_one_gpu_needs_no_links(three: list[dict[str, Any]]) -> None:
    assert _together(three[:1]) == {}
