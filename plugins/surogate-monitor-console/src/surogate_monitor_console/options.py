"""Options of the console monitor, and which of its two views is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from surogate_core.plugin import bundles, events


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleOptions:
    """Options of the console monitor."""

    live: bool = True
    """Use the live view on a terminal; false prints plain lines there too."""
    first: Annotated[int, Ge(0)] = 5
    """Plain lines: steps at the beginning that each get a line."""
    every: Annotated[int, Ge(1)] = 10
    """Plain lines: after those, steps between two lines."""
    seconds: Annotated[float, Ge(0)] = 1.0
    """Plain lines: and one line when this long has passed since the last."""
    completions_seconds: Annotated[float, Ge(0)] = 30.0
    """Reinforcement learning: time between two pairs of completions, the best and the worst of a step."""
    refresh_per_second: Annotated[float, Gt(0)] = 4.0
    """Live view: redraws a second."""


def build(options: ConsoleOptions, info: events.RunInfo) -> bundles.Monitor:
    """The live view on a terminal, plain lines elsewhere."""
    if options.live and info.interactive:
        from surogate_monitor_console.live import LiveView

        return LiveView(options, info)
    from surogate_monitor_console.plain import PlainView

    return PlainView(options, info)
