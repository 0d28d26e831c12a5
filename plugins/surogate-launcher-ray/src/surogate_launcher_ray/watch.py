"""The driver's watch over the supervisors of all machines.

It asks each of them a few times a second. The ranks do not notice: their supervisor answers.
"""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from surogate_core.plugin import launching
from surogate_launcher_ray.cluster import LOST, Member, death, lost
from surogate_launcher_ray.head import HeadProbe
from surogate_launcher_ray.node import MachineReport

log = structlog.get_logger(__name__)

POLL = 0.2
END_SECONDS = launching.GRACE + 3.0
"""The time in which the supervisors end their ranks."""

Show = Callable[[int, bytes], None]
"""(1 for standard output or 2 for errors, what rank 0 has printed) → shows it."""


@dataclass(slots=True, kw_only=True)
class Watched:
    """A machine, and what is known of its share of the run."""

    member: Member
    asked: Any = None
    """The question without an answer."""
    asked_at: float = 0.0
    knows: float = 0.0
    """When the last question with an answer was asked."""
    heard_at: float = field(default_factory=time.monotonic)
    failures: Sequence[launching.Failure] = ()
    result: int | launching.Failure | None = None
    lost: launching.Failure | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.result is not None or self.lost is not None


class RanksWatch:
    """One start of all ranks."""

    def __init__(
        self,
        ray: Any,
        members: Sequence[Member],
        signals: launching.Forwarding,
        *,
        head: HeadProbe,
        silence: float,
        show: Show | None = None,
    ):
        """`silence`: seconds without an answer after which a machine is lost."""
        self._ray, self._signals, self._head, self._limit = ray, signals, head, silence
        self._show = show or shower()
        self._machines = [Watched(member=member) for member in members]
        self._passed_on = False
        self._looked = time.monotonic()

    def run(self) -> int | launching.Failure:
        """Watch until the run is over: the exit code or its first failure. No rank is left then, except on a machine
        that is lost."""
        try:
            return self._watch()
        finally:
            self._stop()

    def _watch(self) -> int | launching.Failure:
        while True:
            if self._signals.at_once:
                return self._stop_code()
            self._pass_on()
            self._hear()
            if self._failures():
                # A rank may end by a signal that was passed on before it could handle it, and the others lose it.
                return self._stop_code() if self._ended_by_signal() else self._first()
            if (code := self._over()) is not None:
                return code
            time.sleep(POLL)

    def _pass_on(self) -> None:
        """Rank 0 gets the signal, and stops the run after the step that all ranks agree on."""
        if self._signals.received is not None and not self._passed_on:
            self._passed_on = True
            self._machines[0].member.actor.receive.remote(int(self._signals.received))

    def _stop_code(self) -> int:
        assert self._signals.received is not None
        return 128 + self._signals.received

    def _ended_by_signal(self) -> bool:
        return self._signals.received is not None and self._machines[0].result == self._stop_code()

    def _failures(self) -> list[launching.Failure]:
        gone = [self._head.look(), *(machine.lost for machine in self._machines)]
        found = [failure for failure in gone if failure is not None]
        return found + [failure for machine in self._machines for failure in machine.failures]

    def _over(self) -> int | None:
        """The exit code of the run if it is over: everywhere, or where rank 0 was and the others do not follow."""
        codes = [machine.result for machine in self._machines if isinstance(machine.result, int)]
        code = next((code for code in codes if code), 0)
        if len(codes) == len(self._machines):
            return code
        now = time.monotonic()
        ended = [m for m in self._machines if isinstance(m.result, int) and (m.result or m.member.first == 0)]
        if ended and now - min(machine.heard_at for machine in ended) > launching.LEAVE:
            left = ", ".join(machine.member.name for machine in self._machines if machine.result is None)
            log.warning(f"the ranks on {left} did not end with the run, and were killed")
            return code
        return None

    # ----------------------------------------------------------------------------- questions

    def _hear(self) -> None:
        """Take the answers that are there, and ask again."""
        now = time.monotonic()
        if now - self._looked > launching.STOPPED:  # this process was stopped
            for machine in self._machines:
                machine.heard_at = now
        self._looked = now
        for machine in self._machines:
            if not machine.over:
                self._ask(machine, now)

    def _ask(self, machine: Watched, now: float) -> None:
        errors = self._ray.exceptions
        if machine.asked is not None and self._ray.wait([machine.asked], timeout=0)[0]:
            asked, machine.asked = machine.asked, None
            try:
                self._take(machine, self._ray.get(asked), now)
            except errors.ActorUnavailableError:
                pass  # Ray may connect to it again; `heard_at` decides
            except errors.RayActorError as error:
                machine.lost = lost(machine.member, f"{LOST}: {death(error)}")
        elif machine.asked is not None and (seconds := now - machine.heard_at) > self._limit:
            machine.lost = lost(machine.member, f"the machine is lost: no answer for {seconds:.0f} seconds.")
        if machine.asked is None and not machine.over:
            machine.asked, machine.asked_at = machine.member.actor.look.remote(), now

    def _take(self, machine: Watched, report: MachineReport, now: float) -> None:
        machine.heard_at, machine.knows = now, machine.asked_at
        for stream, text in report.output:
            self._show(stream, text)
        machine.failures = [replace(failure, at=now - failure.at) for failure in report.failures]
        machine.result = report.result

    # ----------------------------------------------------------------------------- end

    def _first(self) -> launching.Failure:
        """The first failure of all machines. Rank 0 has ended the record of the run by then."""
        latest = time.monotonic() + launching.WINDOW
        # Each machine has an answer from after that, or is lost.
        self._hear_until(lambda machine: machine.over or machine.knows >= latest, self._limit + POLL)
        first = launching.first_of(self._failures())
        for machine in self._machines:
            if not machine.over:
                machine.member.actor.end.remote(first)
        self._hear_until(lambda machine: machine.over, END_SECONDS)
        return first

    def _stop(self) -> None:
        """End what is left of the ranks."""
        left = [machine for machine in self._machines if not machine.over]
        for machine in left:
            machine.member.actor.stop.remote()
        self._hear_until(lambda machine: machine.over, END_SECONDS, stopping=True)

    def _hear_until(self, holds: Callable[[Watched], bool], seconds: float, *, stopping: bool = False) -> None:
        """Hear until it holds for all machines, the seconds are over, or a second signal comes."""
        until = time.monotonic() + seconds
        while not all(map(holds, self._machines)) and time.monotonic() < until:
            if self._signals.at_once and not stopping:
                return
            time.sleep(POLL / 4)
            self._hear()


def shower() -> Show:
    """Shows what rank 0 prints as if this process did."""
    decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in (1, 2)}

    def show(stream: int, text: bytes) -> None:
        to = sys.stdout if stream == 1 else sys.stderr
        to.write(decoders[stream].decode(text))
        to.flush()

    return show
