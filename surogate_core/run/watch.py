"""What the process that starts a run adds to the run's monitors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from surogate_core.events import RunInfo

if TYPE_CHECKING:
    from surogate_core.bundles import Monitor


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Callbacks of Python code. They see the same events as monitors and are no part of the configuration."""

    callbacks: Mapping[str, Callable[[RunInfo], Monitor]] = field(default_factory=dict)
    """Name → what builds the monitor. It stays in the launching process."""
    quiet: bool = False
    """Leave out the monitors that print."""
    placed: Callable[[str], None] | None = None
    """Receives the run's directory, which a run without `output_dir` gets when it starts."""
