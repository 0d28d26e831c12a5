"""What an offline run of the real package leaves on disk, in the package's own records."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import surogate_monitor_wandb

from surogate_core.plugin import MachineError, events
from surogate_testing.check import NotApplicable
from surogate_testing.monitors import events_of_run, sees_a_run
from surogate_testing.run_events import END, EVENTS, START, step


def monitor(directory: Path, **options: Any) -> Any:
    pytest.importorskip("wandb")
    spec = surogate_monitor_wandb.surogate_monitor()
    config = {"learning_rate": 1e-3, "name": "<script>", "model": {"path": None}, "monitor": [{"name": "wandb"}]}
    info = events.RunInfo(run_name="r", output_dir=str(directory), task="sft", config=config, interactive=False)
    return spec.build(spec.options(**{"mode": "offline", **options}), info)


BLOCK, HEADER = 32768, 7


def records(directory: Path) -> list[Any]:
    """The records of the only run, once its exit is written: wandb's process may still be at it."""
    deadline = time.monotonic() + 20
    while not (found := list(written(directory))) or not any(r.HasField("exit") for r in found):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def written(directory: Path) -> Iterator[Any]:
    """What is there of the records: protobufs in the frames of a LevelDB log, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # full, or the last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(directory: Path) -> list[dict[str, Any]]:
    found = []
    for record in records(directory):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append({key: value for key, value in items.items() if not key.startswith("_")})
    return found


def test_an_offline_run_read_back(tmp_path: Path) -> None:
    writer = monitor(tmp_path)
    answers = [writer.on_event(event) for event in (*EVENTS, step(3, math.nan), END)]
    (notice,) = answers[1].events
    assert isinstance(notice, events.Notice)
    assert notice.message.startswith(f"Weights & Biases: wandb sync {tmp_path}/wandb/offline-run-")
    assert [answer for answer in answers if answer is not None] == [answers[1]]
    writer.close()
    lines = history(tmp_path)
    assert [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line][:2] == [(1, 3.0), (2, 2.5)]
    assert math.isnan(float(lines[-1]["train/loss"]))
    assert {"step": 2, "eval/loss": 1.25} in lines
    assert {"step": 2, "phase": "plateau"} in lines
    assert {"step": 2, "advice/plateau": "It stands. k: turn."} in lines
    assert [line["samples/nrows"] for line in lines if "samples/nrows" in line] == [2]
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    assert json.loads(file.read_text())["data"] == [["Why?", "<b>So.\nYes."], ["The chain", ""]]
    kinds = {record.WhichOneof("record_type"): record for record in records(tmp_path)}
    assert kinds["exit"].exit.exit_code == 0
    (run,) = [r.run for r in records(tmp_path) if r.WhichOneof("record_type") == "run"]
    assert (run.display_name, run.project, run.run_id) == ("r", "surogate", writer.state()["id"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["learning_rate"], config["name"], config["monitor"]) == (1e-3, "<script>", [{"name": "wandb"}])


def test_completions_are_a_table_with_their_rewards(tmp_path: Path) -> None:
    writer = monitor(tmp_path)
    writer.on_event(START)
    for event in events_of_run():
        if isinstance(event, events.Rollouts | events.RolloutSamples):
            writer.on_event(event)
    writer.close()
    lines = history(tmp_path)
    assert [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line] == [(3, 0.5)]
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/completions_*.table.json")
    assert json.loads(file.read_text())["data"] == [
        ["2 + 2", " 4", 1.0, 0.7, "stop", 2],
        ["2 + 2", " [", None, None, "timeout", 8],
    ]


def test_a_resumed_run_has_the_same_id(tmp_path: Path) -> None:
    first = monitor(tmp_path / "a")
    first.on_event(START)
    first.on_event(step(1, 1.0))
    first.close()
    second = monitor(tmp_path / "b")
    second.load_state(json.loads(json.dumps(first.state())))
    second.on_event(replace(START, start_step=1))
    second.on_event(step(2, 2.0))
    second.close()
    assert first.state() == second.state()
    assert first.state()["id"]
    assert [line["step"] for line in history(tmp_path / "b")] == [2]
    exits = [record.exit.exit_code for record in records(tmp_path / "a") if record.WhichOneof("record_type") == "exit"]
    assert exits == [1], "no end was told"


def test_without_credentials_auto_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    writer = monitor(tmp_path, mode="auto")
    writer.on_event(START)
    writer.close()
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_without_the_package_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    spec = surogate_monitor_wandb.surogate_monitor()
    info = events.RunInfo(run_name="r", output_dir=str(tmp_path), task="sft", config={}, interactive=False)
    with pytest.raises(MachineError, match=r"Fix: pip install 'surogate-monitor-wandb\[client\]'"):
        spec.build(spec.options(), info)
    with pytest.raises(NotApplicable, match="not installed"):
        sees_a_run(spec)


def test_the_option_has_the_defaults() -> None:
    from omegaconf import OmegaConf

    spec = surogate_monitor_wandb.surogate_monitor()
    yaml = resources.files("surogate_monitor_wandb.conf.monitor").joinpath("wandb.yaml").read_text()
    values = dict(OmegaConf.create(yaml))
    assert values.pop("name") == spec.name == "wandb"
    assert spec.options(**values) == spec.options()
