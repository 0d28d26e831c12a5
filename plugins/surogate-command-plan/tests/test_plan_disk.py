"""`surogate plan` with tensors in files: their size on the disk, and whether there is space for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from surogate_command_plan import fit
from surogate_command_plan.gpus import Room

from surogate_core.plugin import atomic
from surogate_core.plugin import surogate as main
from surogate_core.service.engine import Held, Prediction

SMALL = ["model.config.num_hidden_layers=2", "sequence_len=256", "per_device_train_batch_size=2", "lora=false"]
DISK = ["offload=disk", "cpu_training=true"]


def plan(capsys: Any, *arguments: str) -> dict[str, Any]:
    value = json.loads(text(capsys, *arguments, "--json"))
    assert isinstance(value, dict)
    return value


def text(capsys: Any, *arguments: str) -> str:
    assert main(["plan", "sft", *SMALL, *arguments]) == 0
    out = capsys.readouterr().out
    assert isinstance(out, str)
    return out


def prediction(**places: int) -> Prediction:
    held = tuple(Held(kind=place, place=place, nbytes=n, detail="") for place, n in places.items())
    return Prediction(held=held, schedule=(), parameters=0, trainable_parameters=0, kernels={}, again=0)


@pytest.mark.slow
def test_the_total_is_of_the_kinds_that_rest_there(capsys: Any) -> None:
    found = plan(capsys, *DISK, "--gpu", "h200", "--fit", "4GiB")
    on_disk = {h["kind"]: h["nbytes"] for h in found["held"] if h["place"] == "disk"}
    assert set(on_disk) == {"compute copies", "masters", "gradients", "optimizer state"}
    trained = found["trainable_parameters"]
    assert on_disk["gradients"] >= 4 * trained
    assert found["disk_bytes"] == sum(on_disk.values())
    assert found["disk_bytes"] > (2 + 4 + 4 + 2) * trained
    assert found["host_bytes"] == 0
    assert found["fit"][0]["overrides"] == []
    assert found["fit"][0]["disk_bytes"] == found["disk_bytes"]


@pytest.mark.slow
def test_the_total_says_what_it_does_not_have(capsys: Any) -> None:
    assert "; a lower bound: holes in the heap took up to 34 % more in measured runs" in text(capsys, "device=cpu")
    assert "; fragmentation not included" in text(capsys, "--gpu", "h200")


@pytest.mark.slow
def test_a_disk_is_named_where_something_rests_on_it(capsys: Any) -> None:
    nbytes = plan(capsys, *DISK)["disk_bytes"]
    with_disk = text(capsys, *DISK, "--fit", "4GiB")
    totals = re.findall(r"^.*device .+, host .+$", with_disk, re.MULTILINE)
    assert len(totals) > 1, "of the plan, and of proposals"
    assert all(f", disk {atomic.human_bytes(nbytes)}" in line for line in totals)
    assert "disk" not in text(capsys, "--fit", "4GiB").partition("Memory, predicted")[2]
    assert plan(capsys)["disk_bytes"] == 0


@pytest.mark.slow
def test_a_disk_without_room(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = tmp_path / "not" / "yet"
    keys = (*DISK, f"offload_dir={made}")
    assert "Fix: " not in text(capsys, *keys)
    assert list(tmp_path.iterdir()) == []
    asked = []

    def free(path: Path) -> int:
        asked.append(path)
        return 3 * 2**20

    monkeypatch.setattr(atomic, "free_bytes", free)
    out = text(capsys, *keys, "--fit", "4GiB")
    assert f"the disk of {made} has 3 MiB free. Fix: set offload_dir to a directory of another disk" in out
    assert f"s more a step; the disk of {made} has 3 MiB free\n" in out
    assert f"the disk of {tmp_path} has" in text(capsys, *DISK, f"output_dir={tmp_path}")
    assert asked == [made, tmp_path]
    assert "has 3 MiB free" not in text(capsys, f"offload_dir={made}"), "nothing rests there"

    def refuse(path: Path) -> int:
        raise PermissionError(13, "no", str(path))

    monkeypatch.setattr(atomic, "free_bytes", refuse)
    assert "Fix: " not in text(capsys, *keys)


def test_proposals_with_room_come_first() -> None:
    def proposal(name: str, **places: int) -> Any:
        return fit.Proposal(changes=(name,), config=None, prediction=prediction(**places), seconds=0)  # type: ignore[arg-type]

    room = Room(host=10, disk=5, directory="scratch")
    ordered = [
        proposal("too much", device=5, disk=6),
        proposal("held", device=8, disk=5),
        proposal("alike", device=8, disk=5),
        proposal("none", device=8),
    ]
    assert [p.changes[0] for p in fit.best(100, ordered, room=room)] == ["held", "none", "too much"]
    assert room.short_of(prediction(device=99, host=10, disk=5)) == {}
    assert set(room.short_of(prediction(host=11, disk=6))) == {"host", "disk"}
    assert Room(host=None, disk=None, directory="").short_of(prediction(host=11, disk=6)) == {}
