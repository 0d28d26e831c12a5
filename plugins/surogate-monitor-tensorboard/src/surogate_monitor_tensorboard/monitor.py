"""The run's figures as scalars of TensorBoard, written by torch's own writer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.plugin import events, trackers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SECONDS = 1.0
"""Time between two writes of scalars."""

QUEUE = 1000
"""Steps that wait for the writer's thread at most; with its own 10 the loop would wait for it at every write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorboardOptions:
    """Options of the TensorBoard monitor."""

    directory: str = "tensorboard"
    """Directory of the event files, in `output_dir` unless absolute."""


class TensorboardMonitor(trackers.Tracker):
    """Scalars of every step and evaluation; configuration, phases, advice and samples as text.

    A run that resumes at step s hides what a killed run had written of later steps.
    """

    def __init__(self, options: TensorboardOptions, info: events.RunInfo):
        super().__init__(options, info)
        # Imported when the monitor is built, so that a missing package ends the run before anything that takes long.
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._class, self._summary = SummaryWriter, Summary
        self._waiting: list[tuple[float, int, Mapping[str, float]]] = []
        self._written_at = 0.0

    def begin(self, event: events.RunStart) -> tuple[SummaryWriter, str]:
        """A writer of event files, which need no notice."""
        purge = event.start_step + 1 if event.start_step else None
        directory = Path(self.info.output_dir) / self.options.directory
        writer = self._class(str(directory), purge_step=purge, max_queue=QUEUE)
        text = json.dumps(dict(self.info.config), indent=1, default=str)
        writer.add_text("config", _as_it_is(text), event.start_step)
        return writer, ""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """All of a step as one event, all of a second at once: each by itself costs several times as much."""
        now = time.time()
        if values:
            self._waiting.append((now, step, values))
        if now - self._written_at >= SECONDS:
            self._write_waiting(self.run)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text."""
        self.run.add_text(name, text, step)

    def samples(self, event: events.Samples | events.RolloutSamples) -> None:
        """Write a text for each completion."""
        for name, text in trackers.samples_of(event).items():
            self.text(event.step, name, _as_it_is(text))

    def finish(self, run: SummaryWriter, ended: trackers.Ended) -> None:
        """Flush and close the file."""
        self._write_waiting(run)
        run.close()

    def _write_waiting(self, writer: SummaryWriter) -> None:
        waiting, self._waiting = self._waiting, []
        assert writer.file_writer is not None
        for at, step, values in waiting:
            summary = self._summary(value=[self._summary.Value(tag=n, simple_value=v) for n, v in values.items()])
            writer.file_writer.add_summary(summary, step, at)
        self._written_at = time.time()


def _as_it_is(text: str) -> str:
    """The text as a block of Markdown whose lines are kept."""
    return "".join(f"    {line}\n" for line in text.splitlines())
