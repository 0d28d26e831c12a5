"""Events out, controls back: the bus between the loop and its monitors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import structlog

from surogate_core.bundles import Monitor
from surogate_core.events import Control, Event, Notice
from surogate_core.train.signals import TimeUp, time_limit

log = structlog.get_logger(__name__)

CLOSE_SECONDS = 300.0
"""The time that a monitor has to close, uploads included; then the run continues without it."""


def fault_of(control: object) -> str:
    """What is wrong with a monitor's answer, as a phrase that begins with the answer; empty where it is a control."""
    if not isinstance(control, Control):
        return f"{control!r:.60}, which is not a Control"
    if not isinstance(control.lr_scale, (int, float, type(None))):
        return f"lr_scale {control.lr_scale!r:.60}, which is not a number"
    if not isinstance(control.fade_steps, int) or control.fade_steps < 0:
        return f"fade_steps {control.fade_steps!r:.60}, which is not a number of steps"
    if not isinstance(control.events, tuple | list):
        return f"events {control.events!r:.60}, which is not a tuple of events"
    for event in control.events:
        if not isinstance(event, Event):
            return f"an event {event!r:.60}, which is not one of surogate_core.events"
    return ""


class EventBus:
    """Passes every event to every monitor. A monitor that raises is closed and disabled, and the run continues."""

    def __init__(self, monitors: Mapping[str, Monitor]):
        """`monitors`: name → monitor, in the order in which they see events."""
        self._monitors = dict(monitors)
        self.failures: list[str] = []
        """The monitors that failed and were disabled, one sentence each."""

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
                fault = fault_of(control) if control is not None else ""
                if fault:
                    controls += self._disable(name, f"event {event.name}", ValueError(f"it answered with {fault}"))
                elif control is not None:
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
        """Close every monitor, also when one fails or hangs at it."""
        for name, monitor in self._monitors.items():
            _close(name, monitor)
        self._monitors = {}

    def _disable(self, name: str, doing: str, error: Exception) -> list[Control]:
        monitor = self._monitors.pop(name)
        log.warning("a monitor failed and is disabled", monitor=name, doing=doing, error=repr(error), exc_info=error)
        _close(name, monitor)
        message = f"monitor {name} failed at {doing} and is disabled for the rest of the run: {error!r}"
        self.failures.append(message)
        return self.emit(Notice(level="warning", message=message, data={"monitor": name}))


def _close(name: str, monitor: Monitor) -> None:
    try:
        with time_limit(CLOSE_SECONDS):
            monitor.close()
    except TimeUp as error:
        what = f"monitor {name} did not close within {CLOSE_SECONDS:g} s; the run continues without it"
        log.warning(what, monitor=name, exc_info=error)
    except Exception as error:
        log.warning(f"monitor {name} failed to close", monitor=name, error=repr(error), exc_info=True)
