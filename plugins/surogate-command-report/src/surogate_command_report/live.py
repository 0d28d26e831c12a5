"""The run's events, kept in memory, and the server that shows them."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surogate_command_report.options import WebOptions
from surogate_command_report.serve import MetricsFollower, PageServer
from surogate_core.plugin import UserError, atomic, events, read_run
from surogate_core.service.files import RunRecord, private

URL_FILE = "web.url"

WAITING = 1000
"""Events that are kept as they are at most."""


class WebMonitor:
    """Serves the live page while the run lasts.

    The address, token included, is in ``output_dir/web.url``, which only its owner may read, and on the terminal, if
    there is one. No event has it, because other monitors write events to files and send them to servers. A run that
    resumes shows what came before, as far as the monitor jsonl has kept it.
    """

    def __init__(self, options: WebOptions, info: events.RunInfo):
        self._output = Path(info.output_dir)
        self._record = RunRecord(directory=self._output, name=info.run_name, live=True)
        self._waiting: deque[tuple[float, events.Event]] = deque()
        self._taking = threading.Lock()
        self._others = [MetricsFollower(Path(directory).expanduser()) for directory in options.compare]
        try:
            self._server = PageServer(self._runs, port=options.port)
        except OSError as error:
            raise UserError(
                f"monitor.web.port={options.port}: cannot be listened on: {error.strerror}. Fix: set another, or 0."
            ) from error
        self._write_url()
        if sys.stderr.isatty():  # a file that the output goes to may have other readers
            sys.stderr.write(f"Live page: {self._server.url}\n")
            sys.stderr.flush()

    def on_event(self, event: events.Event) -> events.Control | None:
        """Keep the event; the answer to the run's start says where the address is."""
        if isinstance(event, events.RunStart):
            return self._run_start(event)
        # Taken in when the page asks, or now and then: no step pays for it.
        self._waiting.append((time.time(), event))
        if len(self._waiting) >= WAITING:
            self._take_in()
        return None

    def state(self) -> dict[str, Any]:
        """Nothing: a resumed run reads its history from the metrics."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Stop serving."""
        self._server.close()
        for other in self._others:
            other.close()
        (self._output / URL_FILE).unlink(missing_ok=True)

    def _run_start(self, event: events.RunStart) -> events.Control:
        self._take_in()
        if event.start_step:
            self._record = self._history(event.start_step)
        self._record.read_files()
        self._record.add(_record(time.time(), event))
        message = f"Live page on port {self._server.port}; its address is in {self._output / URL_FILE}"
        return events.Control(events=(events.Notice(level="info", message=message),))

    def _history(self, step: int) -> RunRecord:
        """The metrics of the steps up to `step`; empty if there are none."""
        try:
            found = read_run(self._output)
        except UserError:
            found = RunRecord(directory=self._output, name=self._record.name)
        found.name, found.live = self._record.name, True
        found.drop_after(step)
        return found

    def _take_in(self) -> None:
        with self._taking:
            while self._waiting:
                self._record.add(_record(*self._waiting.popleft()))

    def _runs(self) -> list[RunRecord]:
        self._take_in()
        return [self._record, *(other.record for other in self._others)]

    def _write_url(self) -> None:
        self._output.mkdir(parents=True, exist_ok=True)
        path = self._output / URL_FILE
        atomic.write_file(path, f"{self._server.url}\n".encode(), opener=private)


def _record(at: float, event: events.Event) -> dict[str, Any]:
    """The event as ``metrics.jsonl`` has it."""
    return {**events.event_fields(event), "time": at}
