"""The run's figures as scalars of TensorBoard, written by torch's own writer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.train.events import Advice, Control, Event, PhaseChange, RunInfo, RunStart
from surogate_core.train.scalars import scalars_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorboardOptions:
    """Options of the TensorBoard monitor."""

    directory: str = "tensorboard"
    """Directory of the event files, in `output_dir` unless absolute."""


class TensorboardMonitor:
    """Scalars of every step and evaluation; configuration, phases and advice as text.

    A run that resumes at step s hides what a killed run had written of later steps.
    """

    def __init__(self, options: TensorboardOptions, info: RunInfo):
        # A missing package is to be told before anything long is done.
        from torch.utils.tensorboard import SummaryWriter

        self._class = SummaryWriter
        self._directory, self._info = Path(info.output_dir) / options.directory, info
        self._writer: SummaryWriter | None = None

    def on_event(self, event: Event) -> Control | None:
        """Write the event, if TensorBoard can show it."""
        if isinstance(event, RunStart):
            self.close()
            purge = event.start_step + 1 if event.start_step else None
            self._writer = self._class(str(self._directory), purge_step=purge)
            text = json.dumps(dict(self._info.config), indent=1, default=str)
            self._text("config", "".join(f"    {line}\n" for line in text.splitlines()), event.start_step)
        step, scalars = scalars_of(event)
        for name, value in scalars.items():
            self._scalar(name, value, step)
        match event:
            case PhaseChange():
                self._text("phase", event.phase, event.step)
            case Advice():
                self._text(f"advice/{event.rule}", f"{event.message} {event.key}: {event.suggestion}.", event.step)
        return None

    def state(self) -> dict[str, Any]:
        """Nothing: the files are the state."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalar(self, tag: str, value: float, step: int) -> None:
        if self._writer is not None:
            self._writer.add_scalar(tag, value, step)

    def _text(self, tag: str, text: str, step: int) -> None:
        if self._writer is not None:
            self._writer.add_text(tag, text, step)
