"""A run of Trackio, by the official package, which writes in a thread of its own."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from surogate_core.errors import MachineError
from surogate_core.events import (
    Advice,
    Control,
    Event,
    Notice,
    PhaseChange,
    RolloutSamples,
    RunEnd,
    RunInfo,
    RunStart,
    Samples,
)
from surogate_core.train.scalars import samples_of, scalars_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioOptions:
    """Options of the Trackio monitor."""

    project: str = "surogate"
    """Project that the run belongs to."""
    space_id: str | None = None
    """Hugging Face Space to send to, OWNER/NAME; null keeps the run on this machine."""


class TrackioMonitor:
    """Metrics, the configuration, phases, advice and samples; a resumed run continues under the same name."""

    def __init__(self, options: TrackioOptions, info: RunInfo):
        # Import now, so that a missing package ends the run before anything slow starts.
        try:
            import trackio
        except ModuleNotFoundError as error:
            raise MachineError(
                "monitor trackio: its package is not installed. Fix: pip install 'surogate-monitor-trackio[client]'"
            ) from error
        self._trackio, self._options, self._info = trackio, options, info
        self._run: Any = None

    def on_event(self, event: Event) -> Control | None:
        """Log the event, if there is something to show."""
        if isinstance(event, RunStart):
            return self._begin(event)
        if self._run is None:
            return None
        step, values = scalars_of(event)
        match event:
            case PhaseChange():
                self._run.log({"phase": event.phase}, step=event.step)
            case Advice():
                text = f"{event.message} {event.key}: {event.suggestion}."
                self._run.log({f"advice/{event.rule}": text}, step=event.step)
            case Samples() | RolloutSamples():
                self._run.log(samples_of(event), step=event.step)
            case RunEnd():
                self._finish()
            case _ if values:
                self._run.log(values, step=step)
        return None

    def state(self) -> dict[str, Any]:
        """Nothing: the run is found by its name."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Finish a run that sent no `RunEnd`."""
        self._finish()

    def _begin(self, event: RunStart) -> Control:
        self._finish()
        options = self._options
        with _silent():
            self._run = self._trackio.init(
                project=options.project,
                name=self._info.run_name,
                space_id=options.space_id,
                config=_plain({**self._info.config, "model_title": event.model}),
                resume="allow" if event.start_step else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        where = options.space_id or f'trackio show --project "{options.project}"'
        return Control(events=(Notice(level="info", message=f"Trackio: {where}"),))

    def _finish(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            with _silent():
                self._trackio.finish()


@contextmanager
def _silent() -> Iterator[None]:
    """Trackio prints; the console is the console monitor's."""
    with redirect_stdout(io.StringIO()):
        yield


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        # Keys that begin with an underscore are Trackio's own.
        return {str(key).lstrip("_"): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
