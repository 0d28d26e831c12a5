"""The thread that generates: it takes requests from a queue while others run.

One model is active at a time. Its requests may overtake those for other models, so that the weights do not change for
every request, until one of these has waited for `PATIENCE`. Then nothing joins until the weights have changed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import structlog

from surogate_command_serve.asks import RequestError
from surogate_core.plugin import SurogateError, bundles, inference
from surogate_core.service.config import record_traceback

log = structlog.get_logger(__name__)

MOST_WAITING = 1024
"""Completions that may wait."""
PATIENCE = 1.0
"""Seconds for which requests for the active model overtake one for another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The next token of a completion of a ticket."""

    place: int
    token: int
    logprob: float
    reason: bundles.Reason | None


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """The completions that a client waits for."""

    model: str
    requests: Sequence[bundles.Request]
    watches: Sequence[inference.GrowingText]
    """Finds the stop texts of each."""
    events: SimpleQueue[Chosen | RequestError] = field(default_factory=SimpleQueue)
    """What has happened, for the thread that answers."""
    gone: bool = False
    """Whether nobody waits any more; set by the thread that answers."""
    wake: Callable[[], None] = lambda: None
    """Called from the thread that generates when something has happened."""
    arrived: float = field(default_factory=time.monotonic)
    begun: int = 0
    """Requests that the engine has."""

    @property
    def taken(self) -> bool:
        """Whether the engine has all of them."""
        return self.begun == len(self.requests)

    def tell(self, event: Chosen | RequestError) -> None:
        """Something has happened."""
        self.events.put(event)
        self.wake()


class Worker:
    """Generates in a thread until it is closed."""

    def __init__(
        self,
        engine: bundles.RolloutEngine,
        *,
        slots: int,
        activate: Callable[[str], None] = lambda model: None,
        most_waiting: int = MOST_WAITING,
        patience: float = PATIENCE,
    ):
        """`activate` puts a model's weights in place; `slots`: the sequences that the engine runs at a time."""
        self._engine, self._activate, self._slots, self._most_waiting = engine, activate, slots, most_waiting
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, tuple[Ticket, int]] = {}
        """The engine's number of a request → its ticket and its place there."""
        self._count = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="surogate-engine", daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Put a ticket into the queue; raises `RequestError` if it is full or the server stops."""
        with self._changed:
            waiting = sum(len(one.requests) - one.begun for one in self._waiting)
            if self._closed:
                raise _stopping()
            if self._waiting and waiting + len(ticket.requests) > self._most_waiting:
                raise RequestError(f"{waiting} completions are waiting. Fix: try again later.", status=429, code="busy")
            self._waiting.append(ticket)
            self._changed.notify()

    def counts(self) -> tuple[int, int]:
        """(completions that run, completions that wait)."""
        with self._changed:
            return len(self._running), sum(len(one.requests) - one.begun for one in self._waiting)

    def close(self) -> None:
        """End every completion, and the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=30)

    # --------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    self._fail(_stopping())
                    return
                model = self._waiting[0].model
            self._count = 0
            try:
                self._activate(model)
                self._engine.serve(partial(self._arriving, model), self._chosen)
            except SurogateError as error:
                self._fail(RequestError(str(error), status=500))
            except BaseException as error:  # also the panics of a library, which are no `Exception`
                log.error("generation failed", traceback=str(record_traceback("generation failed", error)))
                self._fail(RequestError("generation failed; the server's log has the reason.", status=500))

    def _arriving(self, model: str) -> list[bundles.Request]:
        found: list[bundles.Request] = []
        with self._changed:
            overdue = time.monotonic() - self._patience
            for ticket in () if self._closed else self._waiting:
                if ticket.gone:
                    continue
                if ticket.model != model and ticket.arrived <= overdue:
                    break
                while ticket.model == model and not ticket.taken and len(self._running) < self._slots:
                    found.append(ticket.requests[ticket.begun])
                    self._running[self._count] = ticket, ticket.begun
                    self._count, ticket.begun = self._count + 1, ticket.begun + 1
            self._waiting = deque(ticket for ticket in self._waiting if not (ticket.gone or ticket.taken))
        return found

    def _chosen(self, index: int, token: int, logprob: float) -> bool:
        ticket, place = self._running[index]
        if self._closed or ticket.gone:
            if self._closed:
                ticket.tell(_stopping())
            return self._over(index)
        request, watch = ticket.requests[place], ticket.watches[place]
        stopped = watch.take(token)
        reason: bundles.Reason | None = None
        if stopped or token in request.stop_ids:
            reason = "stop"
        elif len(watch.ids) >= request.max_new_tokens:
            reason = "length"
        if reason is not None:
            self._over(index)
        ticket.tell(Chosen(place=place, token=token, logprob=logprob, reason=reason))
        return stopped

    def _over(self, index: int) -> bool:
        with self._changed:
            del self._running[index]
        return True

    def _fail(self, error: RequestError) -> None:
        """End the tickets that the engine has, or the first one if it has none; all of them if the server stops."""
        with self._changed:
            found = [ticket for ticket, _ in self._running.values()] or list(self._waiting)[:1]
            if self._closed:
                found += self._waiting
            self._running.clear()
            self._waiting = deque(ticket for ticket in self._waiting if ticket not in found)
            for ticket in dict.fromkeys(found):
                ticket.gone = True
                ticket.tell(error)


def _stopping() -> RequestError:
    return RequestError("the server is stopping.", status=503, code="stopping")
