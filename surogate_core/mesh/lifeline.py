"""What ties a rank to the supervisor of its machine: it reports progress, and hears when another rank fails."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from surogate_core.errors import SurogateError

_WORDS = 4
"""64-bit words of a report: the step, its time, the limit, the time of an error; times in ns."""
_SOON = -1
SECOND_THOUGHT = 2.0
"""Seconds that rank 0 with an error waits for the news that another rank failed before it, which may be the cause."""
STUCK = 1.0
"""Seconds after which the main thread of rank 0 counts as stuck if a failure of another rank does not interrupt it."""


class RankError(SurogateError):
    """A rank has died, stopped or failed."""

    def __init__(self, message: str, *, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


class PeerFailed(BaseException):
    """Another rank has failed. Not an `Exception`: code that survives every error must not survive this."""


class Lifeline:
    """The lifeline of a rank without a supervisor: nothing is reported, and nothing is heard."""

    def beat(self, step: int) -> None:
        """This rank has finished the step and goes on to the next one, which takes about as long."""

    def rest(self) -> None:
        """What this rank does until the next `beat` may take any time: evaluation, a save, an export."""

    def hurry(self, seconds: float) -> None:
        """Set a deadline for the next piece of work: if this rank takes longer than `seconds`, it counts as hanging."""

    def on_failure(self, end: Callable[[str], None]) -> None:
        """Call `end` with the message if another rank fails while this one's main thread is stuck."""

    def cause_of(self, error: BaseException) -> BaseException:
        """The error to show for an error of this rank: the failure of another rank if that was first."""
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a rank has reported last."""

    step: int
    at: float
    """`time.monotonic()` of the report."""
    limit: float
    """Seconds within which the next report comes; 0: at any time, below 0: as soon as steps take."""
    failed_at: float
    """When it met an error; 0 if it has not."""


class Pulses:
    """The file in which every rank reports, as the supervisor sees it."""

    def __init__(self, file: Path, world: int):
        """Make the file."""
        file.write_bytes(bytes(world * _WORDS * 8))
        self._words = _mapped(file)

    def read(self) -> list[Pulse]:
        """The last reports of all ranks."""
        found = []
        for begin in range(0, len(self._words), _WORDS):
            step, at, limit, failed = self._words[begin : begin + _WORDS]
            found.append(Pulse(step=step, at=at / 1e9, limit=limit / 1e9, failed_at=failed / 1e9))
        return found


def _mapped(file: Path) -> memoryview:
    """The file's 64-bit words. Each is written at once, so that nobody reads half of one."""
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")


class Tied(Lifeline):
    """The lifeline of a rank under a supervisor.

    `pulses`: the file of the reports. `news`: the descriptor of a pipe on which the supervisor writes what failed;
    its end means that the supervisor is gone, and the process ends too. `first`: the supervisor's first rank.
    """

    def __init__(self, rank: int, pulses: Path, news: int, *, first: int = 0):
        self._words = _mapped(pulses)
        self._begin = (rank - first) * _WORDS
        self._step, self._failed_at = 0, 0
        self._leads = rank == 0
        self._heard, self._over = threading.Event(), threading.Event()
        self._news = ""
        self._ending = False
        self._ends: list[Callable[[str], None]] = []
        signal.signal(signal.SIGUSR1, self._interrupt)
        threading.Thread(target=self._listen, args=(news,), name="surogate-lifeline", daemon=True).start()

    def beat(self, step: int) -> None:
        """As `Lifeline.beat`."""
        self._step = step
        self._write(_SOON)

    def rest(self) -> None:
        """As `Lifeline.rest`."""
        self._write(0)

    def hurry(self, seconds: float) -> None:
        """As `Lifeline.hurry`."""
        self._write(int(seconds * 1e9))

    def on_failure(self, end: Callable[[str], None]) -> None:
        """As `Lifeline.on_failure`."""
        self._ends.append(end)

    def cause_of(self, error: BaseException) -> BaseException:
        """As `Lifeline.cause_of`."""
        self._ending = True
        if not self._failed_at:
            self._failed_at = time.monotonic_ns()
            self._write(0)
        if isinstance(error, SurogateError):
            return error
        # Collectives fail with errors of their own where another rank is gone.
        if isinstance(error, PeerFailed) or self._heard.wait(SECOND_THOUGHT if self._leads else 0):
            return RankError(self._news)
        return error

    def over(self) -> None:
        """The work of this rank is over."""
        self._ending = True
        self._over.set()

    def _write(self, limit: int) -> None:
        report = (self._step, time.monotonic_ns(), limit, self._failed_at)
        for number, word in enumerate(report):
            self._words[self._begin + number] = word

    def _listen(self, news: int) -> None:
        text = b""
        while not text.endswith(b"\0"):
            part = os.read(news, 65536)
            if not part:
                os.kill(os.getpid(), signal.SIGKILL)
            text += part
        self._news = text[:-1].decode(errors="replace")
        self._heard.set()
        if not self._leads:
            return
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        if self._ending or self._over.wait(STUCK) or self._ending:
            return
        # The main thread waits for the other ranks inside a library, and never comes back.
        self._ending = True
        for end in self._ends:
            end(self._news)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._ending and self._heard.is_set():
            self._ending = True
            raise PeerFailed
