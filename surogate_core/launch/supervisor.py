"""The supervisor: starts the ranks of a run, watches them, and ends all of them when one fails.

It never starts CUDA and imports no torch. A rank fails if it dies, raises, is stopped, or finishes no step for a long
time. The first failure is the one that is reported. Nothing of the run is left when the supervisor returns.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from surogate_core.errors import MachineError, SurogateError, UserError
from surogate_core.files import atomic
from surogate_core.files.private import private
from surogate_core.launch import worker
from surogate_core.launch.forwarding import Forwarding
from surogate_core.mesh.lifeline import SECOND_THOUGHT, RankError, make_pulses, read_pulses

POLL = 0.05
WINDOW = 0.3
"""Seconds after a failure in which the failures of other ranks are collected, to find the first one."""
GRACE = SECOND_THOUGHT + 4.0
"""Seconds that rank 0 has after a failure to end the record of the run."""
STOPPED = 3.0
"""Seconds after which a stopped process counts as failed."""
SLOWER = 20
"""Times the median step after which a rank without a new step counts as failed."""
LEAVE = 60.0
"""Seconds that a rank has to end its process, or to end its work after rank 0 has ended its own."""
LAST_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to start."""

    job: Mapping[str, Any]
    """The job, as `worker` reads it."""
    environments: Sequence[Mapping[str, str]]
    """The environment of each rank."""
    logs: Path | None = None
    """Directory of ``rank-R.log``, which take the output of ranks other than 0; None: it goes nowhere."""
    silence: float = 60.0
    """Seconds without a step after which a rank counts as failed; 0: never."""
    command: Sequence[str] = (sys.executable, "-P", "-m", worker.__name__)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.environments)


@dataclass(slots=True, kw_only=True)
class Failure:
    """A rank that failed."""

    rank: int
    message: str
    code: int
    at: float
    error: type[SurogateError] = RankError
    """The class of the error to raise for it."""
    may_pass: bool = True
    """Whether the run may get further when it starts again."""


@dataclass(slots=True, kw_only=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    news: int
    log: Path | None
    log_began: int
    stopped_since: float | None = None
    ended: float | None = None
    """When the process was found dead."""
    done: float | None = None
    """When the outcome was found that says that the work is over."""
    outcome: Mapping[str, Any] | None = None

    @property
    def code(self) -> int | None:
        """The exit code of the rank's work, if that is over."""
        if self.outcome is not None and self.outcome["kind"] == worker.DONE:
            return int(self.outcome["code"])
        return None


class Attempt:
    """One start of all ranks; `run` returns the exit code or the first failure, when all processes are gone."""

    def __init__(self, plan: Plan, signals: Forwarding):
        self._plan, self._signals = plan, signals
        self._children: list[_Child] = []
        self._steps: deque[float] = deque(maxlen=64)
        self._last_beat: tuple[int, float] | None = None
        self._awake = time.monotonic()
        """When this process last looked at the ranks."""
        self._slept = 0.0
        """When it last went on after it was stopped itself."""

    def run(self) -> int | Failure:
        """Start and watch the ranks."""
        with ExitStack() as stack:
            self._directory = Path(tempfile.mkdtemp(prefix="surogate-run-"))
            stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            stack.callback(self._end_all)
            self._start()
            stack.enter_context(self._signals.to(self._targets()))
            return self._watch()

    # --------------------------------------------------------------------------- start

    def _start(self) -> None:
        directory = self._directory
        atomic.write_file(directory / worker.JOB, json.dumps(self._plan.job).encode(), opener=private)
        make_pulses(directory / worker.PULSES, self._plan.world)
        for rank, environment in enumerate(self._plan.environments):
            self._children.append(self._start_one(rank, environment))

    def _start_one(self, rank: int, environment: Mapping[str, str]) -> _Child:
        log = self._plan.logs / f"rank-{rank}.log" if rank and self._plan.logs is not None else None
        read, write = os.pipe()
        with ExitStack() as stack:
            stack.callback(os.close, read)
            output: Any = None if rank == 0 else subprocess.DEVNULL
            if log is not None:
                output = stack.enter_context(open(log, "ab", opener=private))
            # A session of its own: Ctrl-C in a terminal reaches the supervisor alone, which passes it on.
            process = subprocess.Popen(
                [*self._plan.command, str(self._directory), str(rank), str(read), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                pass_fds=(read,),
                start_new_session=True,
            )
            began = os.fstat(output.fileno()).st_size if log is not None else 0
        return _Child(rank=rank, process=process, news=write, log=log, log_began=began)

    def _targets(self) -> Sequence[int]:
        return [child.process.pid for child in self._children]

    # --------------------------------------------------------------------------- watch

    def _watch(self) -> int | Failure:
        while True:
            if self._signals.at_once:
                return 128 + (self._signals.received or signal.SIGTERM)
            failure = self._failure()
            if failure is not None:
                if self._stopping_early(failure):
                    return 128 + (self._signals.received or signal.SIGTERM)
                return self._first(failure)
            if all(child.ended for child in self._children):
                codes = [child.code or 0 for child in self._children]
                return next((code for code in codes if code), 0)
            time.sleep(POLL)

    def _failure(self) -> Failure | None:
        """A failure, if there is one now."""
        now = time.monotonic()
        if now - self._awake > STOPPED:
            # This process itself was stopped, or the machine slept.
            self._last_beat = None
            for child in self._children:
                child.stopped_since = None
            self._slept = now
        self._awake = now
        found = [failure for child in self._children if (failure := self._failure_of(child, now)) is not None]
        return min(found, key=lambda failure: failure.at) if found else self._silent(now)

    def _failure_of(self, child: _Child, now: float) -> Failure | None:
        if child.ended is None and child.process.poll() is not None:
            child.ended = now
            child.outcome = child.outcome or _outcome(self._directory / worker.OUTCOME.format(child.rank))
            _kill(child)  # processes that it started
        if child.ended is not None:
            return None if child.code is not None else self._death(child)
        if _state(child.process.pid) != "T":
            child.stopped_since = None
        elif child.stopped_since is None:
            child.stopped_since = now
        elif now - child.stopped_since > STOPPED:
            text = f"was stopped by a signal (SIGSTOP or SIGTSTP) and did not go on within {STOPPED:.0f} seconds"
            return self._failed(child, text, 128 + signal.SIGSTOP, now)
        return self._lingering(child, now)

    def _lingering(self, child: _Child, now: float) -> Failure | None:
        """Deal with a process that does not end although its work, or that of rank 0, is over."""
        if child.outcome is None:
            child.outcome = _outcome(self._directory / worker.OUTCOME.format(child.rank))
            child.done = now
        leader = self._children[0]
        if child.outcome is not None and child.done is not None and now - child.done > LEAVE / 2:
            _kill(child)
        elif child.outcome is None and leader.ended is not None and leader.code == 0 and now - leader.ended > LEAVE:
            return self._failed(child, "did not end its work after rank 0 had", 1, now)
        return None

    def _death(self, child: _Child) -> Failure:
        assert child.ended is not None
        status, outcome = child.process.returncode, child.outcome
        if outcome is not None:
            refused = outcome["kind"] == worker.REFUSED
            return Failure(
                rank=child.rank,
                message=str(outcome["message"]),
                code=int(outcome["code"]),
                at=float(outcome["at"]),
                error={2: UserError, 3: MachineError}.get(int(outcome["code"]), RankError) if refused else RankError,
                may_pass=not refused or outcome["code"] == 1,
            )
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            hint = ", which the kernel sends too when the machine's memory is full" if -status == signal.SIGKILL else ""
            # A kill comes before every error that it causes in other ranks.
            return self._failed(child, f"was killed by {name}{hint}", 128 - status, 0.0)
        return self._failed(child, f"ended with exit code {status} and no message", status or 1, child.ended)

    def _silent(self, now: float) -> Failure | None:
        """The rank that has finished no step for too long, if there is one."""
        if not self._plan.silence:
            return None
        pulses = read_pulses(self._directory / worker.PULSES)
        first = pulses[0]
        if self._last_beat is not None and first.stepping and first.step > self._last_beat[0]:
            self._steps.append((first.at - self._last_beat[1]) / (first.step - self._last_beat[0]))
        self._last_beat = (first.step, first.at) if first.stepping else None
        if not self._steps:
            return None
        limit = max(self._plan.silence, SLOWER * median(self._steps))
        late = [
            rank for rank, pulse in enumerate(pulses) if pulse.stepping and now - max(pulse.at, self._slept) > limit
        ]
        late = [rank for rank in late if self._children[rank].ended is None]
        if not late:
            return None
        rank = min(late, key=lambda rank: (pulses[rank].step, pulses[rank].at))
        others = [other for other in range(self._plan.world) if pulses[other].step > pulses[rank].step]
        where = f"; the others are in step {pulses[others[0]].step + 1}" if others else ""
        self._dump_stacks()
        text = f"has been silent in step {pulses[rank].step + 1} for {now - pulses[rank].at:.0f} seconds{where}"
        return self._failed(self._children[rank], text, 1, now)

    def _dump_stacks(self) -> None:
        """Have each rank write where it is."""
        for child in self._children:
            with suppress(ProcessLookupError):
                os.kill(child.process.pid, signal.SIGUSR2)
        time.sleep(0.2)
        for child in self._children:
            stacks = self._directory / worker.STACKS.format(child.rank)
            if child.log is not None and stacks.is_file():
                with suppress(OSError), open(child.log, "ab", opener=private) as log:
                    log.write(stacks.read_bytes())

    def _failed(self, child: _Child, text: str, code: int, at: float) -> Failure:
        who = f"rank {child.rank} of {self._plan.world} (process {child.process.pid})"
        return Failure(rank=child.rank, message=f"{who} {text}.{_last_lines(child)}", code=code, at=at)

    # ----------------------------------------------------------------------------- end

    def _stopping_early(self, failure: Failure) -> bool:
        """Whether the failure is but the end of a rank that a passed-on signal reached before it could handle it."""
        received = self._signals.received
        return received is not None and failure.rank == 0 and failure.code == 128 + received

    def _first(self, failure: Failure) -> Failure:
        """The first failure of all ranks, given one of them; rank 0 has ended the record by then."""
        until = time.monotonic() + WINDOW
        found = {failure.rank: failure}
        while time.monotonic() < until and len(found) < self._plan.world:
            now = time.monotonic()
            for child in self._children:
                if child.rank not in found and (other := self._failure_of(child, now)) is not None:
                    found[child.rank] = other
            time.sleep(POLL)
        if (where := self._directory / worker.PULSES).is_file():
            for rank, pulse in enumerate(read_pulses(where)):
                if rank in found and pulse.failed_at and found[rank].at:
                    found[rank].at = min(found[rank].at, pulse.failed_at)
        first = min(found.values(), key=lambda one: one.at)
        same = sum(one.message == first.message for one in found.values())
        if (first.rank and same == 1 and issubclass(first.error, UserError | MachineError)) or (
            first.rank and not first.message.startswith("rank ")
        ):
            first.message = f"rank {first.rank} of {self._plan.world}: {first.message}"
        self._tell_rank_0(first)
        return first

    def _tell_rank_0(self, failure: Failure) -> None:
        leader = self._children[0]
        for child in self._children[1:]:
            _kill(child)
        if leader.ended is None:
            with suppress(OSError):
                os.write(leader.news, failure.message.encode()[:60_000] + b"\0")
        with suppress(subprocess.TimeoutExpired):
            leader.process.wait(GRACE)

    def _end_all(self) -> None:
        for child in self._children:
            _kill(child)
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(GRACE)
            os.close(child.news)


def supervise(plan: Plan, *, restarts: int = 0, again: Callable[[Failure, int], Plan | None]) -> int:
    """Run the plan; the exit code. Raises the first failure as a `SurogateError` with that rank's exit code.

    After a failure that may pass, `again` (the failure, how many restarts are left) returns the plan to start again.
    """
    with Forwarding() as signals:
        while True:
            result = Attempt(plan, signals).run()
            if isinstance(result, int):
                return result
            if signals.received is not None or not restarts or not result.may_pass:
                break
            restarts -= 1
            following = again(result, restarts)
            if following is None:
                break
            plan = following
    raise (
        result.error(result.message)
        if result.error is not RankError
        else RankError(result.message, exit_code=result.code)
    )


def _kill(child: _Child) -> None:
    """Kill the process and all that it has started in its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)


def _state(pid: int) -> str:
    """The state of a process, such as R or T; empty where there is no such file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _outcome(file: Path) -> Mapping[str, Any] | None:
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _last_lines(child: _Child) -> str:
    """The last lines that the rank has printed, as a paragraph; empty if there are none."""
    if child.log is None:
        return ""
    try:
        with child.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(child.log_began, end - 16_384))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    lines = [line for line in lines if line.strip()][-LAST_LINES:]
    return "".join([f" The last lines of {child.log}:", *(f"\n  {line}" for line in lines)]) if lines else ""
