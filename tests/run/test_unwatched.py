"""Failures of ranks that no supervisor watches: rank 0 shows the first one, and all end."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch.distributed as dist

from surogate_core.errors import MachineError, UserError
from surogate_core.mesh.lifeline import Lifeline
from surogate_core.mesh.mesh import CalledOff, Mesh
from surogate_core.run import unwatched
from surogate_core.run.unwatched import A_RANK_IS_GONE, RANK_0_IS_GONE, announce, cause_of, failure_of_another


def meshes(count: int) -> list[Mesh]:
    store = dist.HashStore()
    return [Mesh(rank=rank, world=count, store=store) for rank in range(count)]


def test_rank_0_shows_the_first_failure() -> None:
    first, second, third = meshes(3)
    announce(second, UserError("no such disk"))
    announce(third, ValueError("later"))
    with pytest.raises(CalledOff):
        first.wait_for("data")
    found = failure_of_another(first)
    assert found is not None
    assert (str(found), found.exit_code) == ("rank 1: no such disk", 2)
    assert failure_of_another(third) is None, "one rank shows it"


def test_a_run_that_a_signal_ended_has_no_failure() -> None:
    first, second = meshes(2)
    first.call_off()
    with pytest.raises(CalledOff):
        second.wait_for("data")
    assert failure_of_another(first) is None


def test_without_rank_0_there_is_no_store() -> None:
    _, second = meshes(2)
    assert str(cause_of(second, dist.DistNetworkError("Connection reset by peer"))) == RANK_0_IS_GONE


def test_a_broken_collective_is_the_fault_of_the_rank_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = meshes(3)
    for mesh in (first, second, third):
        mesh.fabric = cast("Any", object())
    broken = RuntimeError("[/w/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer.")
    assert str(cause_of(second, broken)) == A_RANK_IS_GONE
    monkeypatch.setattr(unwatched, "PATIENCE", 0.1)
    assert str(cause_of(first, broken)) == A_RANK_IS_GONE, "a killed rank leaves no message"
    announce(third, MachineError("out of memory"))
    found = cause_of(first, broken)
    assert (str(found), getattr(found, "exit_code", None)) == ("rank 2: out of memory", 3)
    other = ValueError("own")
    assert cause_of(first, other) is other


def test_a_fault_of_nccl_is_shown_because_no_other_rank_may_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank may have the same fault, and then no other output gives the cause."""
    monkeypatch.setattr(unwatched, "PATIENCE", 0.1)
    broken = dist.DistBackendError("NCCL error in: x.cpp:3690\nLast error:\nCuda failure 2 'out of memory'\n")
    for rank, mesh in enumerate(meshes(2)):  # not connected yet
        end = f"The error of NCCL on rank {rank}: Cuda failure 2 'out of memory'"
        assert str(cause_of(mesh, broken)) == f"{A_RANK_IS_GONE} {end}"


def test_a_supervisor_hears_of_failures_itself() -> None:
    first, second = meshes(2)
    second.lifeline = type("Tied", (Lifeline,), {})()
    announce(second, UserError("no such disk"))
    assert first.store is not None
    assert not first.store.check(["event the run is over"])
    announce(Mesh(), UserError("one rank alone"))
