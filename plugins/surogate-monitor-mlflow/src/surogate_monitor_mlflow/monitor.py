"""A run of MLflow, by its official client, in a thread of its own."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Any

from annotated_types import Gt

from surogate_core.plugin import events, trackers

PARAM_CHARACTERS = 6000
"""Longest value of a parameter that every MLflow server takes."""

BATCH_METRICS = 1000
BATCH_PARAMS = 100
"""Most values that the server takes at once."""

LAST_SECONDS = 60.0
"""How long the end of a run waits for the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowOptions:
    """Options of the MLflow monitor."""

    tracking_uri: str | None = None
    """Where to log; null is `MLFLOW_TRACKING_URI`, and without it `output_dir/mlflow.db`."""
    experiment: str = "surogate"
    """Experiment that the run belongs to; it is made if it is not there."""
    seconds: Annotated[float, Gt(0)] = 2.0
    """Time between two batches that are sent."""


class MlflowMonitor(trackers.Tracker):
    """Metrics, parameters, and phases, advice and samples as tags; a resumed run continues under the same id."""

    title = "MLflow"

    def __init__(self, options: MlflowOptions, info: events.RunInfo):
        super().__init__(options, info)
        mlflow = trackers.package("mlflow", monitor="mlflow", install="surogate-monitor-mlflow[client]")
        output = Path(info.output_dir).absolute()
        uri = options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            output.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{output / 'mlflow.db'}"
        self._uri, self._client = uri, mlflow.MlflowClient(tracking_uri=uri)

    def begin(self, event: events.RunStart) -> tuple[_Sender, str]:
        """The thread that sends to a run, and the run's place."""
        client, name = self._client, self.options.experiment
        if self.id is not None:
            client.update_run(self.id, status="RUNNING")
        else:
            found = client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else client.create_experiment(name)
            run = client.create_run(experiment, run_name=self.info.run_name)
            self.id = str(run.info.run_id)
            self._log_params({**_flat(self.info.config), "model_title": event.model, "device": event.device})
        return _Sender(client, self.id, self.options.seconds), f"run {self.id} at {self._uri}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand values to the thread; raises what went wrong there since the last event."""
        self.run.metrics(step, values)

    def text(self, step: int, name: str, text: str) -> None:
        """Hand a tag to the thread. A tag has no step, so that the text names it."""
        self.run.tag(name.replace("/", "."), text if name == "phase" else f"step {step}: {text}")

    def finish(self, run: _Sender, ended: trackers.Ended) -> None:
        """Send the rest and set the run's status."""
        assert self.id is not None
        run.close()
        self._client.set_terminated(self.id, _STATUS[ended])

    def _log_params(self, values: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        assert self.id is not None
        params = [Param(key, value[:PARAM_CHARACTERS]) for key, value in values.items()]
        for begin in range(0, len(params), BATCH_PARAMS):
            self._client.log_batch(self.id, params=params[begin : begin + BATCH_PARAMS])


_STATUS: Mapping[trackers.Ended, str] = {
    "finished": "FINISHED",
    "stopped": "FINISHED",
    "signal": "KILLED",
    "failed": "FAILED",
    "unknown": "FAILED",
}


class _Sender:
    """Collects values and sends them in batches, so that no step waits for a server."""

    def __init__(self, client: Any, run: str, seconds: float):
        self._client, self._run, self._seconds = client, run, seconds
        self._waiting: SimpleQueue[Any] = SimpleQueue()
        self._closed = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="surogate-mlflow", daemon=True)
        self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send these at the next batch."""
        from mlflow.entities import Metric

        self._check()
        now = int(time.time() * 1000)
        for name, value in values.items():
            self._waiting.put(Metric(name, value, now, step))

    def tag(self, name: str, text: str) -> None:
        """Send a tag, which replaces the one before."""
        from mlflow.entities import RunTag

        self._check()
        self._waiting.put(RunTag(name, text[:PARAM_CHARACTERS]))

    def close(self) -> None:
        """Send the rest, for `LAST_SECONDS` at most; raises the error of the sending thread."""
        self._closed.set()
        self._thread.join(LAST_SECONDS)
        self._check()
        if self._thread.is_alive():
            raise TimeoutError(f"MLflow has not taken the last figures within {LAST_SECONDS:.0f} s")

    def _check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        from mlflow.entities import Metric

        over = False
        while not over and self._error is None:
            over = self._closed.wait(self._seconds)
            try:
                while batch := self._batch():
                    metrics = [value for value in batch if isinstance(value, Metric)]
                    tags = [value for value in batch if not isinstance(value, Metric)]
                    self._client.log_batch(self._run, metrics=metrics, tags=tags)
            except Exception as error:
                self._error = error

    def _batch(self) -> list[Any]:
        found: list[Any] = []
        while len(found) < BATCH_METRICS:
            try:
                found.append(self._waiting.get_nowait())
            except Empty:
                break
        return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key → text."""
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found
