"""Where the time of a run's set-up went, for its log."""

from __future__ import annotations

import time
from collections.abc import Callable

from surogate_core.events import Progress


class SetUpTimes:
    """Seconds of the set-up by task, from the events that show it; ``after X`` is the time between X and the next."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._since, self._name = clock, clock(), "before the first task"
        self._seconds: dict[str, float] = {}

    def saw(self, event: Progress) -> None:
        """A task began, went on or ended."""
        ended = event.done == event.total
        if event.task != self._name:
            self._turn_to(event.task)
        if ended:
            self._turn_to(f"after {event.task}")

    def ended(self) -> dict[str, float]:
        """Seconds by task, the longest first, those below a tenth of a second left out."""
        self._turn_to("")
        shown = {name: round(seconds, 1) for name, seconds in self._seconds.items() if seconds >= 0.1}
        return dict(sorted(shown.items(), key=lambda one: -one[1]))

    def _turn_to(self, name: str) -> None:
        now = self._clock()
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since
        self._since, self._name = now, name
