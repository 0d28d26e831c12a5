"""What the real package reads back from the database that it has written."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import surogate_monitor_trackio

from surogate_core.plugin import MachineError, events
from surogate_testing.check import NotApplicable
from surogate_testing.monitors import sees_a_run
from surogate_testing.run_events import END, EVENTS, START, step


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trackio's own reader, of a directory of the test's own; it takes the place from the environment at its import."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    import trackio
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage, trackio):
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    return sqlite_storage.SQLiteStorage


def monitor(directory: Path, **options: Any) -> Any:
    spec = surogate_monitor_trackio.surogate_monitor()
    config = {"learning_rate": 1e-3, "name": "<script>", "model": {"path": None}}
    info = events.RunInfo(run_name="r", output_dir=str(directory), task="sft", config=config, interactive=False)
    return spec.build(spec.options(**options), info)


def test_a_run_read_back(storage: Any, tmp_path: Path, capsys: Any) -> None:
    writer = monitor(tmp_path, project="p")
    answers = [writer.on_event(event) for event in EVENTS]
    assert [a.events[0].message for a in answers if a] == ['Trackio: trackio show --project "p"']
    writer.on_event(END)
    writer.close()
    assert capsys.readouterr().out == ""
    assert storage.get_runs("p") == ["r"]
    logs = storage.get_logs("p", "r")
    assert [(line["step"], line["train/loss"]) for line in logs if "train/loss" in line] == [(1, 3.0), (2, 2.5)]
    assert [(line["step"], line["eval/loss"]) for line in logs if "eval/loss" in line] == [(2, 1.25)]
    assert [line["phase"] for line in logs if "phase" in line] == ["plateau"]
    assert [line["advice/plateau"] for line in logs if "advice/plateau" in line] == ["It stands. k: turn."]
    assert [line["samples/1"] for line in logs if "samples/1" in line] == ["Why?\n→ <b>So.\nYes."]
    config = storage.get_run_config("p", "r")
    assert (config["learning_rate"], config["name"], config["model_title"]) == (1e-3, "<script>", "m")
    assert (writer.state(), writer.load_state({})) == ({}, None)

    resumed = monitor(tmp_path, project="p")
    resumed.on_event(replace(START, start_step=2))
    resumed.on_event(step(3, 2.0))
    resumed.close()
    assert storage.get_runs("p") == ["r"]
    steps = [line["step"] for line in storage.get_logs("p", "r") if "train/loss" in line]
    assert steps == [1, 2, 3]


def test_without_the_package_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MachineError, match=r"Fix: pip install 'surogate-monitor-trackio\[client\]'"):
        monitor(tmp_path)
    with pytest.raises(NotApplicable, match="not installed"):
        sees_a_run(surogate_monitor_trackio.surogate_monitor())


def test_the_option_has_the_defaults() -> None:
    from omegaconf import OmegaConf

    spec = surogate_monitor_trackio.surogate_monitor()
    yaml = resources.files("surogate_monitor_trackio.conf.monitor").joinpath("trackio.yaml").read_text()
    values = dict(OmegaConf.create(yaml))
    assert values.pop("name") == spec.name == "trackio"
    assert spec.options(**values) == spec.options()
