"""The signals that the supervisor receives, passed on to the ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any


class Forwarding:
    """While entered, passes SIGINT, SIGTERM and SIGHUP on instead of ending the process.

    The first one goes to rank 0, which stops the run after the step that all ranks agree on. After a second one of the
    same kind the run ends at once. Ctrl-Z stops the ranks too, and they go on with this process. Outside the main
    thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal that came, or None."""
        self.at_once = False
        """Whether a second one of the same kind came."""
        self._seen: set[int] = set()
        self._targets: Sequence[int] = ()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Forwarding:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, lambda number, frame: self.receive(number))
            if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
                self._before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: the former handler was not set from Python and cannot be given back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    @contextmanager
    def to(self, targets: Sequence[int]) -> Iterator[None]:
        """The processes that receive the signals, rank 0 first; a signal that came before is passed on now."""
        self._targets = targets
        if self.received is not None:
            self._send(targets[:1], self.received)
        try:
            yield
        finally:
            self._targets = ()

    def receive(self, number: int) -> None:
        """Pass a signal on as if this process had received it."""
        if number in self._seen:
            self.at_once = True
            return
        self._seen.add(number)
        self.received = self.received or signal.Signals(number)
        self._send(self._targets[:1], number)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        self._send(self._targets, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        # Here the process goes on.
        self._send(self._targets, signal.SIGCONT)

    @staticmethod
    def _send(targets: Sequence[int], number: int) -> None:
        for pid in targets:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
