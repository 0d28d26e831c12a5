"""What the real client reads back from the database that it has written."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import surogate_monitor_mlflow

from surogate_core.plugin import MachineError, events
from surogate_testing.check import NotApplicable
from surogate_testing.monitors import sees_a_run
from surogate_testing.run_events import END, EVENTS, START, step


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def monitor(directory: Path, **options: Any) -> Any:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    spec = surogate_monitor_mlflow.surogate_monitor()
    config = {"learning_rate": 1e-3, "name": "<script>", "model": {"path": None, "preset": "tiny"}, "long": "x" * 9000}
    config |= {f"key_{number}": number for number in range(150)}
    info = events.RunInfo(run_name="r", output_dir=str(directory), task="sft", config=config, interactive=False)
    return spec.build(spec.options(**{"seconds": 0.05, **options}), info)


def test_a_run_read_back(tmp_path: Path) -> None:
    writer = monitor(tmp_path / "out")
    from mlflow import MlflowClient

    answers = [writer.on_event(event) for event in (*EVENTS, step(3, math.nan), END)]
    run_id = writer.state()["id"]
    assert [a.events[0].message for a in answers if a] == [
        f"MLflow: run {run_id} at sqlite:///{tmp_path}/out/mlflow.db"
    ]
    writer.close()
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/out/mlflow.db")
    losses = client.get_metric_history(run_id, "train/loss")
    assert [(m.step, m.value) for m in losses[:2]] == [(1, 3.0), (2, 2.5)]
    assert math.isnan(losses[2].value)
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "eval/loss")] == [(2, 1.25)]
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "r")
    assert client.get_experiment(run.info.experiment_id).name == "surogate"
    params = run.data.params
    assert (params["name"], params["model.preset"], params["model.path"]) == ("<script>", "tiny", "null")
    assert params["key_149"] == "149"
    assert len(params["long"]) == 6000
    assert run.data.tags["phase"] == "plateau"
    assert run.data.tags["advice.plateau"] == "step 2: It stands. k: turn."
    assert run.data.tags["samples.1"] == "step 2: Why?\n→ <b>So.\nYes."

    # A resumed run goes on under the same id; one that tells no end has failed.
    resumed = monitor(tmp_path / "out")
    resumed.load_state(json.loads(json.dumps(writer.state())))
    resumed.on_event(replace(START, start_step=2))
    assert client.get_run(run_id).info.status == "RUNNING"
    resumed.on_event(step(3, 30.0))
    resumed.close()
    assert resumed.state() == {"id": run_id}
    assert (3, 30.0) in [(m.step, m.value) for m in client.get_metric_history(run_id, "train/loss")]
    assert client.get_run(run_id).info.status == "FAILED"


class Client:
    """A server that fails."""

    def __init__(self) -> None:
        self.batches = 0

    def log_batch(self, run: str, **values: Any) -> None:
        self.batches += 1
        raise ConnectionError("no server")


def test_what_the_thread_could_not_send_is_raised_at_the_next_event() -> None:
    pytest.importorskip("mlflow")
    from surogate_monitor_mlflow.monitor import _Sender

    client = Client()
    sender = _Sender(client, "id", 0.01)
    sender.metrics(1, {"a": 1.0})
    sender._thread.join(10)
    with pytest.raises(ConnectionError, match="no server"):
        sender.metrics(2, {"a": 1.0})
    sender.close()
    assert client.batches == 1


def test_many_values_are_sent_in_batches() -> None:
    pytest.importorskip("mlflow")
    from surogate_monitor_mlflow.monitor import BATCH_METRICS, _Sender

    sizes = []

    class Counting:
        def log_batch(self, run: str, *, metrics: list[Any], tags: list[Any]) -> None:
            sizes.append(len(metrics) + len(tags))

    sender = _Sender(Counting(), "id", 60.0)
    for number in range(2500):
        sender.metrics(number, {"a": 1.0})
    sender.tag("t", "text")
    sender.close()
    assert sizes == [BATCH_METRICS, BATCH_METRICS, 501]


def test_without_the_package_the_message_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    spec = surogate_monitor_mlflow.surogate_monitor()
    info = events.RunInfo(run_name="r", output_dir=str(tmp_path), task="sft", config={}, interactive=False)
    with pytest.raises(MachineError, match=r"Fix: pip install 'surogate-monitor-mlflow\[client\]'"):
        spec.build(spec.options(), info)
    with pytest.raises(NotApplicable, match="not installed"):
        sees_a_run(spec)


def test_the_option_has_the_defaults() -> None:
    from omegaconf import OmegaConf

    spec = surogate_monitor_mlflow.surogate_monitor()
    yaml = resources.files("surogate_monitor_mlflow.conf.monitor").joinpath("mlflow.yaml").read_text()
    values = dict(OmegaConf.create(yaml))
    assert values.pop("name") == spec.name == "mlflow"
    assert spec.options(**values) == spec.options()
