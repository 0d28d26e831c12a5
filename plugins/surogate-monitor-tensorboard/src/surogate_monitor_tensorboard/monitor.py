"""The run's figures as scalars of TensorBoard, written by torch's own writer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.events import Advice, Control, Event, PhaseChange, RolloutSamples, RunInfo, RunStart, Samples
from surogate_core.train.scalars import samples_of, scalars_of

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


class TensorboardMonitor:
    """Scalars of every step and evaluation; configuration, phases, advice and samples as text.

    A run that resumes at step s hides what a killed run had written of later steps.
    """

    def __init__(self, options: TensorboardOptions, info: RunInfo):
        # Import now, so that a missing package ends the run before anything slow starts.
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._class, self._summary = SummaryWriter, Summary
        self._directory, self._info = Path(info.output_dir) / options.directory, info
        self._writer: SummaryWriter | None = None
        self._waiting: list[tuple[float, Event]] = []
        self._written_at = 0.0

    def on_event(self, event: Event) -> Control | None:
        """Write the event, if TensorBoard can show it."""
        if isinstance(event, RunStart):
            self.close()
            purge = event.start_step + 1 if event.start_step else None
            self._writer = self._class(str(self._directory), purge_step=purge, max_queue=QUEUE)
            text = json.dumps(dict(self._info.config), indent=1, default=str)
            self._text("config", _as_it_is(text), event.start_step)
        if self._writer is not None:
            now = time.time()
            self._waiting.append((now, event))
            if now - self._written_at >= SECONDS:
                self._write_waiting()
        match event:
            case PhaseChange():
                self._text("phase", event.phase, event.step)
            case Advice():
                self._text(f"advice/{event.rule}", f"{event.message} {event.key}: {event.suggestion}.", event.step)
            case Samples() | RolloutSamples():
                for tag, text in samples_of(event).items():
                    self._text(tag, _as_it_is(text), event.step)
        return None

    def state(self) -> dict[str, Any]:
        """Nothing: the files are the state."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Flush and close the file."""
        self._write_waiting()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_waiting(self) -> None:
        """All of a step as one event, all of a second at once: each by itself costs several times as much."""
        waiting, self._waiting = self._waiting, []
        if self._writer is None:
            return
        assert self._writer.file_writer is not None
        for at, event in waiting:
            step, values = scalars_of(event)
            if values:
                summary = self._summary(value=[self._summary.Value(tag=n, simple_value=v) for n, v in values.items()])
                self._writer.file_writer.add_summary(summary, step, at)
        self._written_at = time.time()

    def _text(self, tag: str, text: str, step: int) -> None:
        if self._writer is not None:
            self._writer.add_text(tag, text, step)


def _as_it_is(text: str) -> str:
    """The text as a block of Markdown whose lines are kept."""
    return "".join(f"    {line}\n" for line in text.splitlines())
