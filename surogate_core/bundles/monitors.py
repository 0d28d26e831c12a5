"""Monitors, which receive the events of a run, and reports, which are made from the files in its directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from surogate_core.bundles.options import NoOptions

if TYPE_CHECKING:
    from surogate_core.events import Control, Event, RunInfo


class Monitor(Protocol):
    """The monitor that a `MonitorSpec` builds."""

    def on_event(self, event: Event) -> Control | None:
        """Receive one event; may answer with a control. Never blocks on the device."""

    def state(self) -> dict[str, Any]:
        """The monitor's state for a checkpoint, as JSON values."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""

    def close(self) -> None:
        """Flush and release; called once, also after a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSpec:
    """A monitor."""

    name: str
    """A name in `monitor=[…]`."""
    build: Callable[[Any, RunInfo], Monitor]
    """(options, the run's facts) → the monitor."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
    prints: bool = False
    """Whether it may write to standard output, as a console does; otherwise the conformance kit refuses that."""
    keeps_record: bool = False
    """Whether it writes ``metrics.jsonl`` by `surogate_core.files.metrics`, from which the run's report is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSpec:
    """A report, written at the end of every run that keeps a record and when the figures of a run change."""

    name: str
    """Its name, for messages."""
    write: Callable[[Sequence[Path]], Sequence[Path]]
    """(directories of runs) → the files that it has written; the first is the one to open. Raises `UserError` for a
    directory without a record. An error at the end of a run is a warning in its log."""
