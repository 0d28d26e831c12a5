"""The options of `environment=verifiers`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval

from surogate_core.plugin import bundles


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersOptions:
    """An environment of verifiers."""

    module: Annotated[str, bundles.Code(function=False)] = ""
    """The module of the environment: one with `load_environment` (verifiers 0.1) or with a `Taskset` (0.4)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of `load_environment`, or fields of the taskset's configuration."""
    tasks: Annotated[int, Interval(ge=1, le=10**7)] = 10_000
    """Tasks that are read from a taskset without an end."""
