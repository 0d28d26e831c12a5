"""The queue before the engine, with an engine that the test drives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from surogate_command_serve.asks import RequestError
from surogate_command_serve.worker import Ticket, Worker

from surogate_core.plugin import UserError, bundles


class Counting:
    """Chooses the tokens 0, 1, 2, … for each request; waits for `go` before each step."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.joined: list[int] = []
        self.error: Exception | None = None

    def serve(self, arriving: Any, on_token: Any) -> None:
        running: dict[int, tuple[bundles.Request, int]] = {}
        number = 0
        while True:
            for request in arriving():
                running[number] = request, 0
                self.joined.append(request.number)
                number += 1
            if not running:
                return
            self.go.acquire()
            if self.error is not None:
                raise self.error
            for index, (request, done) in list(running.items()):
                if on_token(index, done, -1.0) or done + 1 == request.max_new_tokens:
                    del running[index]
                else:
                    running[index] = request, done + 1


class Plain:
    """A watch without stop texts."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def take(self, token: int) -> bool:
        self.ids.append(token)
        return False


def ticket(number: int, *, model: str = "a", count: int = 1, tokens: int = 2) -> Ticket:
    requests = [bundles.Request(prompt=(1,), max_new_tokens=tokens, number=number, sample=i) for i in range(count)]
    watches: Any = [Plain() for _ in requests]
    return Ticket(model=model, requests=requests, watches=watches)


@contextmanager
def working(engine: Counting, **options: Any) -> Iterator[Worker]:
    worker = Worker(engine, **{"slots": 2, **options})  # type: ignore[arg-type]
    try:
        yield worker
    finally:
        engine.go.release(1000)
        worker.close()


def reasons(found: Ticket) -> list[Any]:
    """Why the completions of a ticket have ended, in this order; or the error."""
    ended: list[Any] = []
    while len(ended) < len(found.requests):
        event = found.events.get(timeout=20)
        if isinstance(event, RequestError):
            return [*ended, event]
        if event.reason is not None:
            ended.append((event.place, event.token, event.reason))
    return ended


def test_requests_join_those_that_run_as_slots_become_free() -> None:
    engine = Counting()
    with working(engine) as worker:
        first, second = ticket(0, tokens=4), ticket(1, count=3)
        worker.submit(first)
        engine.go.release()
        first.events.get(timeout=20)
        worker.submit(second)
        engine.go.release(100)
        assert reasons(second) == [(place, 1, "length") for place in range(3)]
        assert reasons(first) == [(0, 3, "length")]
        assert engine.joined == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("patience", "turns", "order"), [(0.0, ["a", "b", "a", "b"], [0, 1, 2, 3, 4]), (1e6, ["a", "b"], [0, 1, 3, 2, 4])]
)
def test_models_take_turns(patience: float, turns: list[str], order: list[int]) -> None:
    """In the order of arrival if nobody is patient; otherwise requests for the active model overtake others."""
    engine = Counting()
    active: list[str] = []
    with working(engine, activate=active.append, patience=patience) as worker:
        tickets = [ticket(n, model=model, tokens=3) for n, model in enumerate("aabab")]
        worker.submit(tickets[0])
        engine.go.release()
        tickets[0].events.get(timeout=20)
        for one in tickets[1:]:
            worker.submit(one)
        engine.go.release(100)
        for one in tickets:
            assert reasons(one)[0][2] == "length"
        assert active == turns
        assert engine.joined == order


def test_nobody_waits_for_a_ticket_that_is_gone() -> None:
    engine = Counting()
    with working(engine, slots=1) as worker:
        first, waiting, last = ticket(0, tokens=1000), ticket(1), ticket(2)
        worker.submit(first)
        engine.go.release()
        first.events.get(timeout=20)
        worker.submit(waiting)
        worker.submit(last)
        assert worker.counts() == (1, 2)
        first.gone = waiting.gone = True
        engine.go.release(100)
        assert reasons(last) == [(0, 1, "length")]
        assert engine.joined == [0, 2]


def test_a_full_queue_refuses() -> None:
    engine = Counting()
    with working(engine, slots=1, most_waiting=3) as worker:
        worker.submit(ticket(0, count=50))
        with pytest.raises(RequestError, match="are waiting") as refused:
            worker.submit(ticket(1, count=4))
        assert refused.value.status == 429


@pytest.mark.parametrize("error", [UserError("weights are not numbers"), RuntimeError("secret")])
def test_an_error_of_the_engine_ends_what_it_has(error: Exception) -> None:
    engine = Counting()
    with working(engine, slots=1) as worker:
        first, second = ticket(0), ticket(1)
        worker.submit(first)
        worker.submit(second)
        engine.error = error
        engine.go.release()
        (found,) = reasons(first)
        assert found.status == 500
        assert ("secret" in str(found)) is False
        assert ("weights are not numbers" in str(found)) is isinstance(error, UserError)
        engine.error = None
        engine.go.release(100)
        assert reasons(second) == [(0, 1, "length")]


def test_an_adapter_that_cannot_be_activated() -> None:
    def activate(model: str) -> None:
        if model == "b":
            raise MemoryError

    engine = Counting()
    with working(engine, activate=activate) as worker:
        first, second = ticket(0, model="b"), ticket(1)
        worker.submit(first)
        worker.submit(second)
        engine.go.release(100)
        assert reasons(first)[0].status == 500
        assert reasons(second) == [(0, 1, "length")]


def test_closing_ends_what_runs_and_what_waits() -> None:
    engine = Counting()
    worker = Worker(engine, slots=1)  # type: ignore[arg-type]
    tickets = [ticket(0, tokens=1000), ticket(1)]
    for one in tickets:
        worker.submit(one)
    engine.go.release()
    tickets[0].events.get(timeout=20)
    closing = threading.Thread(target=worker.close)
    closing.start()
    engine.go.release(100)
    for one in tickets:
        assert reasons(one)[0].status == 503
    closing.join()
    with pytest.raises(RequestError, match="is stopping"):
        worker.submit(ticket(2))
