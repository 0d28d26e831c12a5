"""SIGINT, SIGTERM and SIGHUP as a flag that the loop reads between steps; a time limit for what may hang."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """While entered, records the first SIGINT, SIGTERM or SIGHUP (a closed terminal) instead of ending the process.

    The loop finishes its step, saves, and exits with `exit_code`. A second signal of the same kind
    ends the process at once, as if no handler were there. Outside the main thread, where Python
    allows no handlers, it does nothing. A SIGHUP that is ignored already, as under nohup, stays ignored.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal that came, or None."""
        self._seen: set[int] = set()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """129 after SIGHUP, 130 after SIGINT, 143 after SIGTERM, 0 after none."""
        return 128 + self.received if self.received is not None else 0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: the former handler was not set from Python and cannot be given back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._seen:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._seen.add(number)
        if self.received is None:
            self.received = signal.Signals(number)


class TimeUp(BaseException):
    """A `time_limit` has passed; not an `Exception`, so that code which catches every error does not swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` in what runs within once the seconds have passed.

    Code that waits in C is interrupted when it returns to Python. Outside the main thread, and on a system without
    such a timer, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    begin, before = time.monotonic(), signal.signal(signal.SIGALRM, end)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)
        if outer:
            # An enclosing limit continues to count.
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - begin), 1e-3))
