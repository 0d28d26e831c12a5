"""What the processes of a run need to reach each other."""

from __future__ import annotations

import pytest
import torch

from surogate_core.config.resolve import load_run_config
from surogate_core.errors import MachineError
from surogate_core.mesh.mesh import Mesh
from surogate_core.plugins.registry import Registry
from surogate_core.run.links import check_collectives, no_peer_access, slow_links


def test_a_torch_without_collectives_is_named(installed: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run_config(["model=qwen3", "device=cpu", "gpus=2"], registry=installed)
    check_collectives(config)
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    with pytest.raises(MachineError, match=r"gpus=2: torch .* has no gloo, .* Fix: gpus=1"):
        check_collectives(config)


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
