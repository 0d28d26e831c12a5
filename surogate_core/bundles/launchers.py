"""Launchers: how the processes of a run start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surogate_core.bundles.options import NoOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """How the run's processes start."""

    name: str
    """The value of `launcher`."""
    launch: Callable[[Callable[[], int], Any], int]
    """(the run's main, options) → exit code."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
