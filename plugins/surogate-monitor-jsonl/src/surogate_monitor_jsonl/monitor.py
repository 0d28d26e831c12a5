"""The monitor that keeps the run's record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surogate_core.plugin import METRICS, MetricsWriter, events


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlOptions:
    """Options of the JSONL monitor."""

    progress: bool = False
    """Also write progress events, which are many."""


class JsonlMonitor:
    """Hands every event to the core's writer of metrics.jsonl."""

    def __init__(self, options: JsonlOptions, info: events.RunInfo):
        self._writer = MetricsWriter(Path(info.output_dir) / METRICS, progress=options.progress)

    def on_event(self, event: events.Event) -> events.Control | None:
        """Take the event; raises what a write of earlier ones raised."""
        self._writer.add(event)
        return None

    def state(self) -> dict[str, Any]:
        """Nothing: the file itself is the state, and has all events so far when this returns."""
        self._writer.flush()
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
