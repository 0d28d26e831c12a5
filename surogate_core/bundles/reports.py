"""Reports: pages about runs, made from the files in their directories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSpec:
    """A report, written at the end of every run that keeps a record and when the figures of a run change."""

    name: str
    """Its name, for messages."""
    write: Callable[[Sequence[Path]], Sequence[Path]]
    """(directories of runs) → the files that it has written; the first is the one to open. Raises `UserError` for a
    directory without a record. An error at the end of a run is a warning in its log."""
