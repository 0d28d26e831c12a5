"""What the driver concludes from the reports of the machines. The actors are objects of this process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs
from surogate_launcher_ray import watch
from surogate_launcher_ray.cluster import Member, death
from surogate_launcher_ray.facts import Facts
from surogate_launcher_ray.node import MachineReport
from surogate_launcher_ray.watch import RanksWatch

from surogate_core.plugin import UserError, launching


class ActorError(Exception):
    pass


class ActorUnavailableError(ActorError):
    pass


class FakeRay:
    """As much of Ray as the watch needs: a reference is a function that returns the answer or None."""

    exceptions = SimpleNamespace(RayActorError=ActorError, ActorUnavailableError=ActorUnavailableError)

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        there = [ref for ref in refs if ref() is not None]
        return there, [ref for ref in refs if ref not in there]

    def get(self, ref: Any) -> Any:
        found = ref()
        if isinstance(found, Exception):
            raise found
        return found


class Actor:
    """A machine whose reports follow a script; what the driver calls is in `calls`."""

    def __init__(self, *script: Any):
        self.script: Iterator[Any] = iter(script)
        self.last: Any = MachineReport(output=())
        self.calls: list[Any] = []
        self.ends: MachineReport | None = MachineReport(output=(), result=0)
        """The report after the driver ended it."""
        self.stopped = False
        names = ("receive", "end", "stop")
        for name in names:
            setattr(self, name, SimpleNamespace(remote=self._noted(name)))
        self.look = SimpleNamespace(remote=self._look)

    def _noted(self, name: str) -> Callable[..., None]:
        def note(*arguments: Any) -> None:
            self.calls.append((name, *arguments))
            self.stopped = self.stopped or name in ("end", "stop")

        return note

    def _look(self) -> Callable[[], Any]:
        if self.stopped and self.ends is not None:
            self.last = self.ends
        else:
            self.last = next(self.script, self.last)
        found = self.last
        return lambda: found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"POLL": 0.01, "END_SECONDS": 0.3}.items():
        monkeypatch.setattr(watch, name, seconds)
    monkeypatch.setattr("surogate_core.launch.supervisor.WINDOW", 0.02)
    monkeypatch.setattr("surogate_core.launch.child.LEAVE", 0.1)


class Head:
    """Is lost after a number of looks."""

    def __init__(self, looks: float = float("inf")):
        self.left = looks

    def look(self) -> launching.Failure | None:
        self.left -= 1
        return None if self.left > 0 else launching.Failure(rank=0, message="no head.", code=1, at=0.0, may_pass=False)


def run(
    *actors: Actor,
    signals: launching.Forwarding | None = None,
    silence: float = 5.0,
    show: Any = None,
    head: Any = None,
) -> Any:
    members = []
    for number, actor in enumerate(actors):
        facts = Facts(node=f"n{number}", address=f"10.0.0.{number}", host=f"h{number}", installed={}, gpus=())
        member = Member(actor=actor, id=f"n{number}", address=facts.address, first=2 * number, here=2, facts=facts)
        members.append(member)
    shown = show or (lambda stream, text: None)
    looked_at: Any = head or Head()
    return RanksWatch(
        FakeRay(), members, signals or launching.Forwarding(), head=looked_at, silence=silence, show=shown
    ).run()


def failed(rank: int, message: str, ago: float, **values: Any) -> launching.Failure:
    return launching.Failure(
        rank=rank, message=message, code=1, at=ago, host=f"h{rank // 2} (10.0.0.{rank // 2})", **values
    )


def over(code: int) -> MachineReport:
    return MachineReport(output=(), result=code)


NEVER = MachineReport(output=())


def test_the_run_is_over_when_it_is_over_on_all_machines() -> None:
    shown: list[Any] = []
    first = Actor(MachineReport(output=[(1, b"step 1\n"), (2, b"warned\n")]), over(0))
    assert run(first, Actor(NEVER, NEVER, over(0)), show=lambda *part: shown.append(part)) == 0
    assert shown == [(1, b"step 1\n"), (2, b"warned\n")]
    assert run(Actor(over(0)), Actor(over(3))) == 3


def test_machines_that_do_not_follow_rank_0_are_ended() -> None:
    other = Actor(NEVER)
    with capture_logs() as logs:
        assert run(Actor(over(0)), other) == 0
    assert other.calls == [("stop",)]
    assert logs[0]["event"] == "the ranks on h1 (10.0.0.1) did not end with the run, and were killed"


def test_the_first_failure_of_all_machines_is_named() -> None:
    """Rank 0 only sees that its collective fails, and reports that sooner than the other machine does the cause."""
    late = MachineReport(output=(), failures=[failed(0, "a bug: RuntimeError: connection closed", 0.1)])
    cause = MachineReport(output=(), failures=[failed(3, "a bug: ValueError: no such luck", 0.5)])
    first, other = Actor(late), Actor(NEVER, NEVER, cause)
    found = run(first, other)
    assert found.message == "rank 3 on h1 (10.0.0.1): a bug: ValueError: no such luck"
    # All machines hear of it; rank 0 ends the record of the run with it.
    assert [call[0] for call in first.calls] == ["end"]
    assert first.calls[0][1] is other.calls[0][1] is found


def test_what_all_ranks_refuse_is_the_fault_of_none() -> None:
    refused = [
        MachineReport(output=(), failures=[failed(rank, "model: no such thing.", 0.1, kind=UserError, may_pass=False)])
        for rank in (0, 2)
    ]
    assert run(Actor(refused[0]), Actor(refused[1])).message == "model: no such thing."


def test_a_machine_that_does_not_answer_is_lost() -> None:
    silent = Actor(None)
    silent.ends = None
    failure = MachineReport(output=(), failures=[failed(1, "a bug: RuntimeError: connection closed", 0.0)])
    found = run(Actor(NEVER, NEVER, failure), silent, silence=0.2)
    assert found.message.startswith("rank 2 to 3 on h1 (10.0.0.1): the machine is lost: no answer for 0 seconds.")
    assert (found.code, found.may_pass) == (1, True)
    assert "max_restarts=1" in found.text


def test_the_death_of_a_supervisor_is_a_lost_machine() -> None:
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Node\nThe actor died because its node "
    )
    error = ActorError(text + "has died. Node Id: 5")
    found = run(Actor(NEVER), Actor(NEVER, error))
    assert found.message.endswith(
        "the machine or its Ray is lost: The actor died unexpectedly before finishing this task. "
        "The actor died because its node has died. Node Id: 5"
    )
    assert death(ActorError("")) == "ActorError"


def test_a_lost_head_ends_the_run_everywhere() -> None:
    first, other = Actor(NEVER), Actor(NEVER)
    found = run(first, other, head=Head(3))
    assert (found.text, found.may_pass) == ("no head.", False)
    assert [call[0] for call in (*first.calls, *other.calls)] == ["end", "end"]


def test_a_short_interruption_of_the_network_is_no_loss() -> None:
    assert run(Actor(over(0)), Actor(ActorUnavailableError(), NEVER, ActorUnavailableError(), over(0))) == 0


def test_a_driver_that_was_stopped_blames_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_core.launch.child.STOPPED", 0.3)

    class Resting(Actor):
        def _look(self) -> Callable[[], Any]:
            found, began = super()._look(), time.monotonic()
            return lambda: found() if time.monotonic() - began > 0.05 else None

    other = Resting(NEVER, over(0))

    def show(stream: int, text: bytes) -> None:
        time.sleep(0.5)  # Ctrl-Z, and later fg

    assert run(Actor(MachineReport(output=[(1, b"x")]), over(0)), other, silence=0.2, show=show) == 0


def test_a_signal_reaches_the_machine_of_rank_0_once() -> None:
    signals = launching.Forwarding()
    signals.receive(signal.SIGTERM)
    first, other = Actor(NEVER, NEVER, over(143)), Actor(NEVER, over(143))
    assert run(first, other, signals=signals) == 143
    assert (first.calls, other.calls) == ([("receive", 15)], [])


def test_a_signal_before_rank_0_handles_it_is_no_failure_of_the_others() -> None:
    signals = launching.Forwarding()
    signals.receive(signal.SIGINT)
    lost = MachineReport(output=(), failures=[failed(2, "a bug: DistError: the store is gone", 0.0)])
    assert run(Actor(over(130)), Actor(NEVER, NEVER, lost), signals=signals) == 130


def test_a_second_signal_ends_all_machines_at_once() -> None:
    signals = launching.Forwarding()
    for _ in range(2):
        signals.receive(signal.SIGINT)
    actors = Actor(NEVER), Actor(NEVER)
    assert run(*actors, signals=signals) == 130
    assert [actor.calls for actor in actors] == [[("stop",)], [("stop",)]]


def test_what_rank_0_prints_is_shown_as_printed(capfd: pytest.CaptureFixture[str]) -> None:
    show = watch.shower()
    euro = "€".encode()
    show(1, euro[:1])
    show(2, b"to the errors")
    show(1, euro[1:])
    assert capfd.readouterr() == ("€", "to the errors")
