"""The order of a run's phases on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surogate_core.config.resolve import load_run_config
from surogate_core.errors import MachineError
from surogate_core.mesh.mesh import CalledOff, Mesh
from surogate_core.plugins.registry import Registry
from surogate_core.run import run as module
from surogate_core.run.run import _Run, train


class Answered(Mesh):
    """Rank 1 of two, with rank 0's answers."""

    def __init__(self, *answers: Any):
        super().__init__(rank=1, world=2)
        self.answers = list(answers)

    def gather(self, value: Any) -> list[Any]:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return [answer, value]


def test_other_ranks_take_the_commit_that_rank_0_fetched(installed: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch may have moved meanwhile."""
    fetched: list[Any] = []
    monkeypatch.setattr(module, "fetch_base", lambda config, *_, **options: fetched.append((config.model, options)))
    config = load_run_config(["model=owner/name", "device=cpu"], registry=installed)
    _Run(config, installed, watch=None, mesh=Answered(["owner/name", "c0ffee"]))._base()
    ((model, options),) = fetched
    assert (model.path, model.revision, options) == ("owner/name", "c0ffee", {"digests": False})


@pytest.mark.parametrize(
    ("device", "compiler", "starts"),
    [("cuda", "auto", 1), ("cuda", "fx", 0), ("cpu", "auto", 0), ("cpu", "inductor", 0)],
)
def test_the_compile_processes_start_once_the_device_is_known(
    installed: Registry, monkeypatch: pytest.MonkeyPatch, device: str, compiler: str, starts: int
) -> None:
    """Only Triton's kernels are compiled by them."""
    started: list[int] = []
    config = load_run_config(["model=qwen3", f"compiler={compiler}", "device=cpu"], registry=installed)
    base = SimpleNamespace(config=config, device=torch.device(device))
    monkeypatch.setattr(module, "fetch_base", lambda *_: base)
    monkeypatch.setattr(module, "start_workers", lambda: started.append(1))
    _Run(config, installed, watch=None, mesh=Mesh())._base()
    assert len(started) == starts


def test_a_run_that_rank_0_called_off_ends_in_peace(installed: Registry) -> None:
    """A signal came before the first step, and the others waited."""
    config = load_run_config(["model=qwen3", "device=cpu", "gpus=2"], registry=installed)
    assert train(config, installed, mesh=Answered(CalledOff())) == 0


def test_an_error_of_rank_0_is_shown_and_recorded_if_other_ranks_are_gone(
    installed: Registry, tmp_path: Path, records: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may be full for all ranks at once."""

    recorded: list[int] = []

    def end() -> None:
        recorded.append(len(records(tmp_path, "run_end")))
        raise RuntimeError("gloo: Connection closed by peer")

    def phases(run: _Run) -> int:
        loop: Any = SimpleNamespace(leader=SimpleNamespace(end=end), state=None)
        run.loop = loop
        raise MachineError("the disk is full.")

    monkeypatch.setattr(_Run, "_phases", phases)
    config = load_run_config(["model=qwen3", "device=cpu", f"output_dir={tmp_path}"], registry=installed)
    with pytest.raises(MachineError, match="the disk is full"):
        train(config, installed)
    (record,) = records(tmp_path, "run_end")
    assert (record["reason"], record["message"]) == ("failed", "the disk is full.")
    assert recorded == [1], "the record is complete before rank 0 waits for anyone"
