"""The supervisor: starts the ranks of one machine, watches them, and ends all of them when one of the run fails.

It never starts CUDA and imports no torch. A rank fails if it dies, raises an error, is stopped, or finishes no step for
a long time. The first failure is reported. No process of the run is left when the supervisor returns.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from surogate_core.errors import MachineError
from surogate_core.files import atomic
from surogate_core.files.private import private
from surogate_core.launch import worker
from surogate_core.launch.child import LEAVE, STOPPED, Child, Failure
from surogate_core.launch.forwarding import Forwarding
from surogate_core.launch.silence import Silence
from surogate_core.mesh.lifeline import SECOND_THOUGHT, Pulses

log = structlog.get_logger(__name__)

PREFIX = ".surogate-supervisor-"
"""Begins the name of the directory that the processes of a run share, below the one for temporary files."""
LEFT_OVER_SECONDS = 3600.0
"""Age from which such a directory without a supervisor is deleted."""
POLL = 0.05
WINDOW = 0.3
"""Seconds after a failure in which the failures of other ranks are collected, to find the first one."""
GRACE = SECOND_THOUGHT + 4.0
"""Seconds that rank 0 has after a failure to end the record of the run."""
REPORT = 60.0
"""Seconds that a rank has after an error to say which one: it may first search for changes that save memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What to start."""

    job: Mapping[str, Any]
    """The job, as `worker` reads it."""
    environments: Sequence[Mapping[str, str]]
    """The environment of each rank of this machine."""
    first: int = 0
    """The first rank of this machine. Where the run has ranks on others, MASTER_ADDR and MASTER_PORT are set."""
    host: str = ""
    """Name of this machine for messages, in runs of several."""
    output: tuple[int, int] | None = None
    """Descriptors that take what rank 0 prints and its errors; None: those of this process."""
    logs: Path | None = None
    """Directory of ``rank-R.log``, which take what ranks other than 0 print; None: it goes nowhere."""
    silence: float = 60.0
    """Seconds without a step after which a rank counts as failed; 0: never."""
    command: Sequence[str] = (sys.executable, "-I" if sys.flags.isolated else "-P", "-m", worker.__name__)
    """What starts a worker; its arguments follow."""

    @property
    def here(self) -> int:
        """Number of ranks of this machine."""
        return len(self.environments)


class Elsewhere:
    """What a supervisor hears of the ranks of other machines; here: there are none."""

    def failure(self) -> Failure | None:
        """The first failure of the run, if it is known by now and this supervisor has not reported one itself."""
        return None

    def first(self, found: Sequence[Failure]) -> Failure:
        """The first failure of the run, given those of this machine."""
        return first_of(found)


def supervise(plan: LaunchPlan, signals: Forwarding, elsewhere: Elsewhere | None = None) -> int | Failure:
    """Start the ranks of this machine and watch them: the exit code, or the first failure of the run.

    All their processes are gone by then. `signals`: what this process receives or learns of. Raises `MachineError` if
    they cannot be started.
    """
    return _Attempt(plan, signals, elsewhere or Elsewhere()).run()


def first_of(found: Sequence[Failure]) -> Failure:
    """The first of the failures; its message names the rank and the machine, unless all ranks say the same."""
    first = min(found, key=lambda one: one.at)
    alone = all(one is first or one.message != first.message for one in found)
    if (first.rank or first.host) and alone and not first.message.startswith("rank "):
        where = f" on {first.host}" if first.host else ""
        first.message = f"rank {first.rank}{where}: {first.message}"
    return first


class _Attempt:
    """One start of all ranks of this machine."""

    def __init__(self, plan: LaunchPlan, signals: Forwarding, elsewhere: Elsewhere):
        self._plan, self._signals, self._elsewhere = plan, signals, elsewhere
        self._children: list[Child] = []
        self._silence = Silence(plan.silence, plan.here, first=plan.first)
        self._looked = time.monotonic()

    def run(self) -> int | Failure:
        """Start and watch the ranks: the exit code or the first failure. All processes are gone by then."""
        with ExitStack() as stack:
            try:
                kept = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
                self._shared = Path(stack.enter_context(kept))
                stack.callback(os.close, _kept_from_cleaners(self._shared))
                stack.callback(self._end_all)
                _remove_left_over(self._shared)
                self._start()
            except OSError as error:
                raise MachineError(
                    f"the {self._plan.here} processes of the run cannot be started: {error}. Fix: check the free "
                    f"space of {tempfile.gettempdir()} and the limit of processes (ulimit -u)."
                ) from error
            stack.enter_context(self._signals.to([child.process.pid for child in self._children]))
            return self._watch()

    def _start(self) -> None:
        plan, shared = self._plan, self._shared
        given = {**plan.job, "first": plan.first, "here": plan.here}
        atomic.write_file(shared / worker.JOB, json.dumps(given).encode(), opener=private)
        self._pulses = Pulses(shared / worker.PULSES, plan.here)
        for rank, environment in enumerate(plan.environments, plan.first):
            file = plan.logs / f"rank-{rank}.log" if plan.logs is not None else None
            self._children.append(
                Child(rank, plan.command, environment, shared=shared, log=file, output=plan.output, host=plan.host)
            )

    # --------------------------------------------------------------------------- watch

    def _watch(self) -> int | Failure:
        while True:
            if self._signals.at_once:
                return self._stop_code()
            if (other := self._elsewhere.failure()) is not None:
                self._end_with(other)
                return other
            failure = self._failure()
            if failure is not None:
                # A rank may end by a signal that was passed on before it could handle it.
                stopping = self._signals.received is not None and failure.code == self._stop_code()
                return failure.code if stopping else self._first(failure)
            if (code := self._over()) is not None:
                return code
            time.sleep(POLL)

    def _stop_code(self) -> int:
        return 128 + (self._signals.received or signal.SIGTERM)

    def _failure(self) -> Failure | None:
        """A failure, if there is one now."""
        now = time.monotonic()
        # This process itself was stopped, or the machine was very busy.
        slept = now - self._looked > STOPPED
        self._looked = now
        if slept:
            self._silence.forget(now)
        found = [failure for child in self._children if (failure := child.look(now, slept=slept)) is not None]
        if found:
            return min(found, key=lambda failure: failure.at)
        late = self._late(now)
        if late is None or self._children[late[0]].ended is not None:
            return None
        for child in self._children:
            child.dump_stacks()
        return self._children[late[0]].failed(late[1], code=1, at=now)

    def _late(self, now: float) -> tuple[int, str] | None:
        """The number here of the rank whose report is late, and the fact as a phrase; None if there is none."""
        pulses = self._pulses.read()
        late = self._silence.late(pulses, now)
        errors = [(pulse.failed_at, number) for number, pulse in enumerate(pulses) if pulse.failed_at]
        if not errors:
            return late
        # The other ranks wait for the one with the error: they are not late.
        at, number = min(errors)
        waiting = any(child.ended is None for other, child in enumerate(self._children) if other != number)
        if not waiting or now - at < REPORT:
            return None
        return number, f"met an error and did not report it within {REPORT:.0f} seconds"

    def _over(self) -> int | None:
        """The exit code if the run is over here: all ranks have ended, or one has and the others do not follow."""
        now = time.monotonic()
        ended = [child for child in self._children if child.ended is not None]
        code = next((child.code for child in ended if child.code), 0)
        if len(ended) == len(self._children):
            return code
        # Rank 0 ends last, unless all ranks agree to end early.
        waited = [now - (child.ended or now) for child in ended if child.rank == 0 or child.code]
        if waited and max(waited) > LEAVE:
            left = ", ".join(str(child.rank) for child in self._children if child.ended is None)
            log.warning(f"rank {left} did not end with the run, and was killed")
            return code
        return None

    # ----------------------------------------------------------------------------- end

    def _first(self, failure: Failure) -> Failure:
        """The first failure of the run, given one of a rank here. Rank 0 has ended the record of the run by then."""
        found = {failure.rank: failure}
        for now in self._polls(WINDOW):
            for child in self._children:
                if child.rank not in found and (other := child.look(now, slept=False)) is not None:
                    found[child.rank] = other
            if len(found) == self._plan.here:
                break
        for rank, pulse in enumerate(self._pulses.read(), self._plan.first):
            if rank in found and pulse.failed_at:
                found[rank].at = min(found[rank].at, pulse.failed_at)
        first = self._elsewhere.first(list(found.values()))
        self._end_with(first)
        return first

    def _end_with(self, first: Failure) -> None:
        """End the ranks here; rank 0, if it is one of them, ends the record of the run before."""
        leader = next((child for child in self._children if child.rank == 0), None)
        for child in self._children:
            if child is not leader:
                child.kill()
        if leader is not None and leader.ended is None:
            leader.tell(first.text)
            for _ in self._polls(GRACE):
                if leader.process.poll() is not None:
                    break

    def _polls(self, seconds: float) -> Iterator[float]:
        """The times to look until the seconds are over or a second signal comes."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until and not self._signals.at_once:
            yield now
            time.sleep(POLL)

    def _end_all(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.close(GRACE)


def _kept_from_cleaners(directory: Path) -> int:
    """A descriptor with a lock on the directory: systemd-tmpfiles deletes old files, but not under a lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def _remove_left_over(beside: Path) -> None:
    """Delete the directories of this user's supervisors that were killed."""
    for directory in beside.parent.glob(f"{PREFIX}{'?' * (len(beside.name) - len(PREFIX))}"):
        with suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while a supervisor has its lock
                if _is_left_over(directory, os.fstat(descriptor)):
                    for file in directory.iterdir():
                        file.unlink()
                    directory.rmdir()
            finally:
                os.close(descriptor)


def _is_left_over(directory: Path, status: os.stat_result) -> bool:
    """Whether a supervisor made the directory long ago, and it has nothing but files of supervisors and workers."""
    old = time.time() - status.st_mtime >= LEFT_OVER_SECONDS
    if not old or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
        return False
    with os.scandir(directory) as entries:
        return all(entry.is_file(follow_symlinks=False) and worker.SHARED.fullmatch(entry.name) for entry in entries)
