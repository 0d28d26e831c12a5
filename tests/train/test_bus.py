"""The event bus: a monitor may fail, the run may not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog.testing

from surogate_core.train.bus import EventBus
from surogate_core.train.events import Control, Event, Notice

HELLO = Notice(level="info", message="hello")


class Recorder:
    def __init__(self, *, control: Control | None = None, fails: str = ""):
        self.events: list[Event] = []
        self.control = control
        self.fails = fails
        self.closed = 0
        self.restored: Mapping[str, Any] | None = None

    def _may_fail(self, at: str) -> None:
        if self.fails == at:
            raise RuntimeError(f"boom at {at}")

    def on_event(self, event: Event) -> Control | None:
        self._may_fail("event")
        self.events.append(event)
        return self.control

    def state(self) -> dict[str, Any]:
        self._may_fail("state")
        return {"seen": len(self.events)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._may_fail("load")
        self.restored = state

    def close(self) -> None:
        self.closed += 1
        self._may_fail("close")


def test_controls_come_back_in_order() -> None:
    a, b, c = Control(stop=True), None, Control(lr_scale=0.5)
    bus = EventBus({"a": Recorder(control=a), "b": Recorder(control=b), "c": Recorder(control=c)})
    assert bus.emit(HELLO) == [a, c]


def test_a_failing_monitor_is_disabled_once() -> None:
    first, bad, last = Recorder(), Recorder(fails="event"), Recorder(control=Control(save=True))
    bus = EventBus({"first": first, "bad": bad, "last": last})
    with structlog.testing.capture_logs() as logs:
        assert bus.emit(HELLO) == [Control(save=True), Control(save=True)]
        bus.emit(HELLO)
    assert [entry["monitor"] for entry in logs] == ["bad"]
    assert bus.names == ("first", "last")
    assert bad.closed == 1
    notices = [event for event in first.events if event is not HELLO]
    assert len(notices) == 1
    assert isinstance(notices[0], Notice)
    assert "monitor bad" in notices[0].message
    assert notices[0].level == "warning"
    assert [event for event in last.events if event is not HELLO] == notices


def test_all_monitors_failing_ends_quietly() -> None:
    bus = EventBus({name: Recorder(fails="event") for name in "abc"})
    with structlog.testing.capture_logs() as logs:
        assert bus.emit(HELLO) == []
    assert len(logs) == 3
    assert bus.emit(HELLO) == []


def test_state_round_trip_and_failures() -> None:
    monitors = {"good": Recorder(), "unknown": Recorder(), "bad": Recorder(fails="state")}
    bus = EventBus(monitors)
    bus.emit(HELLO)
    with structlog.testing.capture_logs():
        states = bus.state()
    assert states["good"] == {"seen": 1}
    assert "bad" not in states
    again = {"good": Recorder(), "new": Recorder(), "unknown": Recorder(fails="load")}
    bus = EventBus(again)
    with structlog.testing.capture_logs():
        bus.load_state(states)
    assert again["good"].restored == {"seen": 1}
    assert again["new"].restored is None
    assert bus.names == ("good", "new")


def test_close_reaches_everyone_once() -> None:
    monitors = {"a": Recorder(fails="close"), "b": Recorder()}
    bus = EventBus(monitors)
    with structlog.testing.capture_logs():
        bus.close()
        bus.close()
    assert [monitor.closed for monitor in monitors.values()] == [1, 1]
