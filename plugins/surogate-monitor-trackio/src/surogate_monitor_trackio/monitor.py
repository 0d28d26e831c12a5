"""A run of Trackio, by the official package, which writes in a thread of its own."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from surogate_core.plugin import events, trackers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioOptions:
    """Options of the Trackio monitor."""

    project: str = "surogate"
    """Project that the run belongs to."""
    space_id: str | None = None
    """Hugging Face Space to send to, OWNER/NAME; null keeps the run on this machine."""


class TrackioMonitor(trackers.Tracker):
    """Metrics, the configuration, phases, advice and samples; a resumed run continues under the same name."""

    title = "Trackio"

    def __init__(self, options: TrackioOptions, info: events.RunInfo):
        super().__init__(options, info)
        self._trackio = trackers.package("trackio", monitor="trackio", install="surogate-monitor-trackio[client]")

    def begin(self, event: events.RunStart) -> tuple[Any, str]:
        """A run, and its Space or the command that shows it."""
        options = self.options
        config = {**self.info.config, "model_title": event.model}
        with _silent():
            run = self._trackio.init(
                project=options.project,
                name=self.info.run_name,
                space_id=options.space_id,
                # Keys that begin with an underscore are Trackio's own.
                config=trackers.plain(config, key=lambda name: name.lstrip("_"), finite=True),
                resume="allow" if event.start_step else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return run, options.space_id or f'trackio show --project "{options.project}"'

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log values."""
        if values:
            self.run.log(values, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Log a text."""
        self.log(step, {name: text})

    def samples(self, event: events.Samples | events.RolloutSamples) -> None:
        """Log all of them at once."""
        self.run.log(trackers.samples_of(event), step=event.step)

    def finish(self, run: Any, ended: trackers.Ended) -> None:
        """Wait until the thread has written the rest."""
        with _silent():
            self._trackio.finish()


@contextmanager
def _silent() -> Iterator[None]:
    """Trackio prints; the console is the console monitor's."""
    with redirect_stdout(io.StringIO()):
        yield
