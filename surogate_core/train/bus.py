"""Events out, controls back: the bus between the loop and its monitors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import structlog

from surogate_core.bundles import Monitor
from surogate_core.train.events import Control, Event, Notice

log = structlog.get_logger(__name__)


class EventBus:
    """Hands every event to every monitor; one that raises is closed and left out, and the run goes on."""

    def __init__(self, monitors: Mapping[str, Monitor]):
        """`monitors`: name → monitor, in the order in which they see events."""
        self._monitors = dict(monitors)

    @property
    def names(self) -> tuple[str, ...]:
        """The monitors that still listen."""
        return tuple(self._monitors)

    def emit(self, event: Event) -> list[Control]:
        """Show the event to every monitor; returns their controls in the monitors' order."""
        controls = []
        for name, monitor in list(self._monitors.items()):
            if name not in self._monitors:
                continue
            try:
                control = monitor.on_event(event)
            except Exception as error:
                controls += self._disable(name, f"event {event.name}", error)
            else:
                if control is not None:
                    controls.append(control)
        return controls

    def state(self) -> dict[str, Any]:
        """Monitor name → what a checkpoint keeps of it."""
        states = {}
        for name, monitor in list(self._monitors.items()):
            try:
                state = monitor.state()
                json.dumps(state)
            except Exception as error:
                self._disable(name, "saving its state", error)
            else:
                states[name] = state
        return states

    def load_state(self, states: Mapping[str, Any]) -> None:
        """Restore what `state` returned; a monitor that the checkpoint does not know starts afresh."""
        for name, monitor in list(self._monitors.items()):
            if name in states:
                try:
                    monitor.load_state(states[name])
                except Exception as error:
                    self._disable(name, "loading its state", error)

    def close(self) -> None:
        """Close every monitor, also when one fails at it."""
        for name, monitor in self._monitors.items():
            try:
                monitor.close()
            except Exception as error:
                log.warning("a monitor failed to close", monitor=name, error=repr(error), exc_info=True)
        self._monitors = {}

    def _disable(self, name: str, doing: str, error: Exception) -> list[Control]:
        monitor = self._monitors.pop(name)
        log.warning("a monitor failed and is disabled", monitor=name, doing=doing, error=repr(error), exc_info=error)
        with suppress(Exception):
            monitor.close()
        message = f"monitor {name} failed at {doing} and is disabled for the rest of the run: {error!r}"
        return self.emit(Notice(level="warning", message=message, data={"monitor": name}))
