"""Limits of connections, by raw requests."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from surogate_command_serve import limits
from surogate_command_serve.application import BODY_SECONDS
from surogate_command_serve.limits import MOST_OF_ADDRESS, Connections
from surogate_command_serve.server import Server

TOKEN = "a-token-of-the-test"
HEAD = f"Host: a\r\nAuthorization: Bearer {TOKEN}\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


@pytest.fixture
def server() -> Iterator[Server]:
    worker: Any = SimpleNamespace(close=lambda: None)
    with Server({}, worker, token=TOKEN) as made:
        yield made


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def answers(server: Server, data: bytes, *, half: bool = False, wait: float = 5) -> bytes:
    """All that comes back until the server closes the connection, or waits."""
    found = b""
    with connected(server) as connection:
        connection.sendall(data)
        if half:
            connection.shutdown(socket.SHUT_WR)
        connection.settimeout(wait)
        try:
            while part := connection.recv(65536):
                found += part
        except TimeoutError:
            return found + b"(open)"
    return found + b"(closed)"


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_a_body_is_never_the_next_request(server: Server, method: str) -> None:
    inner = f"GET /v1/hidden HTTP/1.1\r\n{HEAD}\r\n"
    for path in ("/v1/models", "/health", "/none"):
        head = f"{method} {path} HTTP/1.1\r\n{HEAD}Content-Length: {len(inner)}\r\n\r\n"
        found = answers(server, (head + inner).encode() + LAST)
        assert found.endswith(b"(closed)")
        assert b"/v1/hidden" not in found
        assert 1 <= found.count(b"HTTP/1.1 ") <= 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Content-Length: 2\r\nContent-Length: 3\r\n", 400),
        ("Content-Length: +2\r\n", 400),
        ("Transfer-Encoding: chunked\r\n", 411),
        ("Transfer-Encoding: chunked\r\nContent-Length: 2\r\n", 411),
        ("Transfer-Encoding: gzip\r\n", 501),
        ("", 411),
    ],
)
def test_bodies_of_unclear_length_close_the_connection(server: Server, headers: str, status: int) -> None:
    found = answers(server, f"POST /v1/completions HTTP/1.1\r\n{HEAD}{headers}\r\n0\r\n\r\n".encode())
    assert found.startswith(f"HTTP/1.1 {status} ".encode())
    assert found.count(b"HTTP/1.1 ") == 1 or b" 400 " in found.rpartition(b"HTTP/1.1")[2]
    assert found.endswith(b"(closed)")
    error = json.loads(found.partition(b"\r\n\r\n")[2].partition(b"}}")[0] + b"}}")["error"]
    assert error["type"] == "invalid_request_error"


def test_another_method_is_told_which_there_are(server: Server) -> None:
    for path, allowed in (("/v1/models", "GET, HEAD"), ("/v1/completions", "POST")):
        found = answers(server, f"PUT {path} HTTP/1.1\r\n{HEAD}\r\n".encode() + LAST)
        assert found.startswith(b"HTTP/1.1 405 ")
        assert f"allow: {allowed}\r\n".encode() in found


def test_the_reason_of_a_refusal_reaches_a_client_that_is_sending(server: Server) -> None:
    data = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 9_000_000
    assert answers(server, data, wait=1).startswith(b"HTTP/1.1 401 ")


def test_a_client_that_closes_its_side_gets_what_is_ready(server: Server) -> None:
    assert b'{"status": "ok"}(closed)' in answers(server, HEALTH, half=True)


def test_a_head_has_a_deadline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.2)
    assert answers(server, b"").endswith(b"(closed)")
    assert answers(server, b"GET /health HTTP/1.1\r\nX: ").startswith(b"HTTP/1.1 408 ")
    second = answers(server, HEALTH + b"GET /health")
    assert second.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in second
    assert answers(server, HEALTH, wait=0.6).endswith(b"(open)"), "between requests there is more time"


def test_a_body_has_a_deadline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_command_serve.application.BODY_SECONDS", 0.2)
    monkeypatch.setattr("surogate_command_serve.application.DRAIN_SECONDS", 0.1)
    found = answers(server, f"POST /v1/completions HTTP/1.1\r\n{HEAD}Content-Length: 9\r\n\r\n{{".encode())
    assert found.startswith(b"HTTP/1.1 408 ")
    assert found.endswith(b"(closed)")
    assert BODY_SECONDS > 60


def test_connections_without_a_request_give_way(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_CONNECTIONS", 8)
    with ExitStack() as stack:
        held = [stack.enter_context(connected(server)) for _ in range(40)]
        for connection in held:
            connection.settimeout(5)
        assert answers(server, LAST).startswith(b"HTTP/1.1 200 ")
        assert len(server.connections) <= 8
        assert held[0].recv(1) == b"", "it has lost its place"


class Fake:
    """A connection."""

    def __init__(self, *, busy: bool = False):
        self.is_waiting, self.gone = not busy, False
        self.transport = self

    def abort(self) -> None:
        self.gone = True


def test_places_of_an_address_and_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    places: Any = Connections()
    for _ in range(MOST_OF_ADDRESS):
        assert places.add(Fake(), "192.0.2.1") is None
        assert places.add(Fake(), "::ffff:127.0.0.1") is None
    assert places.add(Fake(), "192.0.2.1").status == 429
    assert places.add(Fake(), "192.0.2.2") is None
    assert places.add(Fake(), "127.0.0.1") is None, "a proxy of this machine has many clients"
    monkeypatch.setattr(limits, "MOST_CONNECTIONS", 3)
    places = Connections()
    first, busy, second = Fake(), Fake(busy=True), Fake()
    for one in (first, busy, second):
        assert places.add(one, "::1") is None
    places.renew(first)
    assert places.add(Fake(busy=True), "::1") is None
    assert (first.gone, second.gone) == (False, True)
    assert places.add(Fake(busy=True), "::1") is None
    assert first.gone
    assert places.add(Fake(), "::1").status == 503
    places.remove(busy)
    places.remove(first)
    assert len(places) == 2
