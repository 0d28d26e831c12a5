"""Where the seconds before the first step go: by phase of the command, and by task of the run that it starts.

This module imports nothing heavy, because a command begins with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surogate_core.events import Progress

FIRST = "before the first task"


class SetUpTimes:
    """Seconds of the set-up by task, from the events that show it; ``after X`` is the time between X and the next."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, name: str = FIRST):
        """`name`: the phase or task that has begun."""
        self._clock, self._since, self._name = clock, clock(), name
        self._seconds: dict[str, float] = {}

    def saw(self, event: Progress) -> None:
        """A task began, went on or ended."""
        ended = event.done == event.total
        if event.task != self._name:
            self.turn_to(event.task)
        if ended:
            self.turn_to(f"after {event.task}")

    def ended(self) -> dict[str, float]:
        """Seconds by task, the longest first, those below a tenth of a second left out."""
        self.turn_to("")
        shown = {name: round(seconds, 1) for name, seconds in self._seconds.items() if seconds >= 0.1}
        return dict(sorted(shown.items(), key=lambda one: -one[1]))

    def turn_to(self, name: str) -> None:
        """Another phase or task begins."""
        now = self._clock()
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since
        self._since, self._name = now, name


_of_command: list[SetUpTimes] = []
"""The times of this command, until a run takes them over."""


def begin(phase: str) -> None:
    """The command begins."""
    _of_command[:] = [SetUpTimes(name=phase)]


def turn_to(phase: str) -> None:
    """Another phase of the command begins; nothing happens in a process that no command has begun."""
    if _of_command:
        _of_command[0].turn_to(phase)


def of_run() -> SetUpTimes:
    """The times that a run goes on with: those of its command for the first run of a process."""
    if not _of_command:
        return SetUpTimes()
    times = _of_command.pop()
    times.turn_to(FIRST)
    return times
