"""One rank as the supervisor sees it: a process with its log, its outcome and its failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from surogate_core.errors import MachineError, PluginError, SurogateError, UserError
from surogate_core.files.private import private
from surogate_core.launch import worker
from surogate_core.mesh.lifeline import RankError

log = structlog.get_logger(__name__)

STOPPED = 3.0
"""Seconds after which a stopped process counts as failed."""
LEAVE = 10.0
"""Seconds that a process has to end after its work, and the other ranks after rank 0."""
LEAVE_0 = 300.0
"""The same for the process of rank 0, where a monitor may still send what it has."""
WRITING, PAUSE = 1.0, 0.1
"""Seconds in which a process says where its threads are, at most, and between two looks at what it has said."""
LAST_LINES = 20
RESUME = "Fix: run the same command again, which resumes the last checkpoint, or set max_restarts=1."
"""What a user does after a process of the run was lost."""
_LAST_BYTES = 16_384
_KINDS: dict[int, type[SurogateError]] = {2: UserError, 3: MachineError}


@dataclass(slots=True, kw_only=True)
class Failure:
    """A rank that failed."""

    rank: int
    message: str
    """The rank and what happened to it, as a sentence."""
    code: int
    """The exit code that the run ends with."""
    at: float
    """When, by `time.monotonic()`; 0 for a kill, which comes before every error that it causes in other ranks."""
    kind: type[SurogateError] = RankError
    """The class of the error to raise for it."""
    may_pass: bool = True
    """Whether the run may get further when it starts again."""
    advice: str = ""
    """How to go on, and the last lines of the rank's log."""
    host: str = ""
    """The rank's machine, in runs of several."""

    @property
    def text(self) -> str:
        """The whole message."""
        return f"{self.message} {self.advice}".rstrip()

    def error(self) -> SurogateError:
        """The error to raise."""
        return RankError(self.text, exit_code=self.code) if self.kind is RankError else self.kind(self.text)


class Child:
    """The process of a rank.

    It has a session of its own: Ctrl-C in a terminal reaches only the supervisor, which passes it on, and whatever the
    process starts can be killed with it.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        shared: Path,
        log: Path | None,
        output: tuple[int, int] | None = None,
        host: str = "",
    ):
        """`shared`: the directory of this start of the run. `log`: takes what ranks other than 0 print, and stacks.

        `output`: the descriptors that take what rank 0 prints and its errors; None: those of this process. `host`: the
        name of this machine, for messages in runs of several.
        """
        self.rank, self._shared, self._log, self._host = rank, shared, log, host
        self.ended: float | None = None
        """When the process was found dead."""
        self.outcome: Mapping[str, Any] | None = None
        """What the worker wrote about its end."""
        self._done_at = 0.0
        self._killed = False
        self._stopped_since: float | None = None
        read, self._news = os.pipe()
        with ExitStack() as stack:
            stack.callback(os.close, read)
            streams: tuple[Any, Any] = output or (None, None)
            if rank:
                streams = (subprocess.DEVNULL, subprocess.DEVNULL)
            if log is not None:
                self._log_began = log.stat().st_size if log.is_file() else 0
                if rank:
                    streams = (stack.enter_context(open(log, "ab", opener=private)),) * 2
            self.process = subprocess.Popen(
                [*command, str(shared), str(rank), str(read), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=streams[0],
                stderr=streams[1],
                env=dict(environment),
                pass_fds=(read,),
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """The exit code of the rank's work, if that ended without an error."""
        if self.outcome is not None and self.outcome["kind"] == worker.DONE:
            return int(self.outcome["code"])
        return None

    def look(self, now: float, *, slept: bool) -> Failure | None:
        """The failure of the rank, if there is one now. `slept`: the supervisor was stopped since the last look."""
        if self.ended is None and self.process.poll() is not None:
            self.ended = now
            self.outcome = self.outcome or self._read_outcome()
            self.kill()  # what it started
        if self.ended is not None:
            return None if self.code is not None else self._death(self.ended)
        if slept or _state(self.process.pid) != "T":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since > STOPPED:
            text = f"was stopped by a signal (SIGSTOP or SIGTSTP) and did not continue within {STOPPED:.0f} seconds"
            return self.failed(text, code=128 + signal.SIGSTOP, at=now)
        if self.outcome is None:
            self.outcome, self._done_at = self._read_outcome(), now
        if self.outcome is not None and self.code is None:
            return self._death(now)  # its process may still live long: a thread, a monitor
        if self.outcome is not None and now - self._done_at > (LEAVE if self.rank else LEAVE_0):
            self.kill()  # its work is over, but the process does not end
        return None

    def failed(self, text: str, *, code: int, at: float) -> Failure:
        """A failure that the rank could not report itself."""
        where = f" on {self._host}" if self._host else ""
        message = f"rank {self.rank} (process {self.process.pid}{where}) {text}."
        advice = f"{RESUME}{self._last_lines()}"
        return Failure(rank=self.rank, message=message, code=code, at=at, advice=advice, host=self._host)

    def tell(self, message: str) -> None:
        """Tell the rank which failure ends the run, also if it is stopped."""
        with suppress(OSError):
            os.kill(self.process.pid, signal.SIGCONT)
            os.write(self._news, message.encode()[:60_000] + b"\0")

    def dump_stacks(self) -> None:
        """Have the process write where each of its threads is, into its log."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR2)
        stacks = _whole(self._shared / worker.STACKS.format(self.rank))
        if self._log is not None:
            with suppress(OSError), open(self._log, "ab", opener=private) as log:
                log.write(stacks)

    def kill(self) -> None:
        """Kill the process and all that it has started.

        Only the first call does something: later the system may have given the number to another group.
        """
        if self._killed:
            return
        self._killed = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self, seconds: float) -> None:
        """Wait for the end of the killed process."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            log.warning(f"process {self.process.pid} of rank {self.rank} was killed, but waits in the kernel")
        os.close(self._news)

    def _read_outcome(self) -> Mapping[str, Any] | None:
        try:
            values = json.loads((self._shared / worker.OUTCOME.format(self.rank)).read_bytes())
        except (OSError, ValueError):
            return None
        return values if isinstance(values, dict) else None

    def _death(self, ended: float) -> Failure:
        status, outcome = self.process.returncode, self.outcome
        if outcome is not None:
            code, bug = int(outcome["code"]), outcome["kind"] == worker.BUG
            refused = PluginError if outcome["kind"] == worker.PLUGIN else _KINDS.get(code, RankError)
            return Failure(
                rank=self.rank,
                message=str(outcome["message"]),
                code=code,
                at=float(outcome["at"]),
                kind=RankError if bug else refused,
                may_pass=code == 1,
                advice=self._last_lines().lstrip() if bug else "",
                host=self._host,
            )
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            full = ", which the kernel also sends when the machine's memory is full" if name == "SIGKILL" else ""
            return self.failed(f"was killed by {name}{full}", code=128 - status, at=0.0)
        return self.failed(f"ended with exit code {status} and without a message", code=status or 1, at=ended)

    def _last_lines(self) -> str:
        """The last lines that the rank has printed, as a paragraph; empty if there are none."""
        if self._log is None:
            return ""
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._log_began, file.seek(0, os.SEEK_END) - _LAST_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line.rstrip() for line in text.splitlines() if line.strip()][-LAST_LINES:]
        return "".join([f" The last lines of {self._log}:", *(f"\n  {line}" for line in lines)]) if lines else ""


def _state(pid: int) -> str:
    """The state of a process, such as R or T; empty where there is no such file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _whole(dump: Path) -> bytes:
    """What faulthandler is writing into a file, thread by thread: when the thread in which it runs is there, the main
    one and the last, and nothing more comes.

    A process that is stopped writes nothing, and one on a busy machine takes its time.
    """
    found, until = b"", time.monotonic() + WRITING
    while time.monotonic() < until:
        time.sleep(PAUSE)
        before = found
        with suppress(OSError):
            found = dump.read_bytes()
        if b"Current thread" in found and found == before:
            break
    return found
