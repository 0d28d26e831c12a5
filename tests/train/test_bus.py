"""The event bus: a monitor may fail, the run may not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import structlog.testing

from surogate_core.events import Control, Event, Notice
from surogate_core.train import bus as bus_module
from surogate_core.train.bus import EventBus

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


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("stop", "'stop', which is not a Control"),
        (Control(lr_scale="0.5"), "lr_scale '0.5', which is not a number"),  # type: ignore[arg-type]
        (Control(fade_steps=-1), "fade_steps -1, which is not a number of steps"),
        (Control(events=HELLO), "which is not a tuple of events"),  # type: ignore[arg-type]
        (Control(events=("hello",)), "an event 'hello', which is not one of"),  # type: ignore[arg-type]
    ],
)
def test_an_answer_that_is_no_control_disables_its_monitor(answer: Any, fault: str) -> None:
    first, bad = Recorder(), Recorder(control=answer)
    bus = EventBus({"first": first, "bad": bad})
    with structlog.testing.capture_logs():
        assert bus.emit(HELLO) == []
    assert bus.names == ("first",)
    assert bad.closed == 1
    notice = first.events[-1]
    assert isinstance(notice, Notice)
    assert "monitor bad failed at event notice and is disabled" in notice.message
    assert fault in notice.message


def test_a_monitor_that_hangs_when_it_is_closed_does_not_hold_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Recorder):
        def close(self) -> None:
            super().close()
            time.sleep(60)

    monkeypatch.setattr(bus_module, "CLOSE_SECONDS", 0.05)
    hanging, last = Hanging(), Recorder()
    bus = EventBus({"hanging": hanging, "last": last})
    with structlog.testing.capture_logs() as logs:
        bus.close()
    assert [hanging.closed, last.closed] == [1, 1]
    assert [entry["event"] for entry in logs] == [
        "monitor hanging did not close within 0.05 s; the run continues without it"
    ]
