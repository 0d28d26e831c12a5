"""Limits of connections: how many there are, how long a head may take, and how long a client may not read.

uvicorn has none of these. They are checked before a request has a token, so a client needs none to use up a place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from surogate_command_serve.asks import RequestError

MOST_CONNECTIONS = 512
MOST_OF_ADDRESS = 64
"""Connections of one address. Those from this machine have no such limit: they may be many clients behind a proxy."""
HEAD_SECONDS = 10.0
"""Time for the head of a request, from its first byte or the beginning of the connection."""
IDLE_SECONDS = 60.0
"""Longest wait for the next request on a connection, and for a client that does not take its answer."""
MOST_HEAD_BYTES = 65536
LINGER_SECONDS = 0.25
"""Time in which a client that has closed its side still gets an answer."""

_LOG = logging.getLogger("surogate.http")
_LOG.addHandler(logging.NullHandler())
_LOG.propagate = False


class Connections:
    """The open connections of a server, and whether there is a place for one more."""

    def __init__(self) -> None:
        self._open: dict[LimitedProtocol, str] = {}
        """In the order in which they began to wait for a request, with their addresses."""
        self._of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, one: LimitedProtocol, address: str) -> RequestError | None:
        """Take a connection, or say why not.

        If all places are taken, the connection that has waited longest for a request loses its own.
        """
        if self._of[address] >= MOST_OF_ADDRESS and not _is_loopback(address):
            return RequestError(
                f"this address has {MOST_OF_ADDRESS} connections. Fix: close some of them.", status=429, code="busy"
            )
        if len(self._open) >= MOST_CONNECTIONS:
            waiting = next((other for other in self._open if other.is_waiting), None)
            if waiting is None:
                return RequestError("the server has no free connection. Fix: try again later.", status=503, code="busy")
            self.remove(waiting)
            waiting.transport.abort()
        self._open[one] = address
        self._of[address] += 1
        return None

    def renew(self, one: LimitedProtocol) -> None:
        """A connection begins to wait for its next request."""
        if one in self._open:
            self._open[one] = self._open.pop(one)

    def remove(self, one: LimitedProtocol) -> None:
        """Free the place of a connection, if it has one."""
        address = self._open.pop(one, None)
        if address is not None:
            self._of[address] -= 1
            if not self._of[address]:
                del self._of[address]


def _is_loopback(address: str) -> bool:
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


class LimitedProtocol(H11Protocol):
    """A connection with these limits, whose own errors are JSON."""

    places: Connections
    """Set by `protocol_with`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.logger, self.access_log = _LOG, False
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Take the connection if there is a place."""
        super().connection_made(transport)
        refused = self.places.add(self, self.client[0] if self.client else "")
        if refused is not None:
            self._refuse(refused)
            return
        self._head = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Free its place."""
        self.places.remove(self)
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; a head that has begun has a deadline."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """The connection waits for its next request, which may have come already."""
        self.places.renew(self)
        super().on_response_complete()
        self._watch_head()

    def eof_received(self) -> Any:
        """The client has closed its side: it gets what is ready now, and no more."""
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
        return True

    def pause_writing(self) -> None:
        """The client does not take its answer as fast as it is made."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(IDLE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has taken enough of it."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP, or too long a head of it; uvicorn calls this while it handles h11's error."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        text = str(error) if isinstance(error, h11.RemoteProtocolError) else msg
        if not self.is_waiting:  # an error in a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.is_waiting or not self.cycle.response_started:
            self._refuse(RequestError(f"{HTTPStatus(status).phrase}: {text[:200]}", status=status))
        self.transport.close()

    def _watch_head(self) -> None:
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if begun and self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self._head_is_late)
        elif not begun and self._head is not None and self.conn.their_state is not h11.IDLE:
            self._head.cancel()
            self._head = None

    def _head_is_late(self) -> None:
        if self.conn.trailing_data[0] and self.is_waiting:
            self._refuse(RequestError(f"the request's head took more than {HEAD_SECONDS:g} s.", status=408))
        else:
            self.transport.close()

    def _refuse(self, refused: RequestError) -> None:
        """Answer before there is a request, and close."""
        body = json.dumps(refused.body(), ensure_ascii=False).encode()
        head = (
            f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def protocol_with(places: Connections) -> type[LimitedProtocol]:
    """The protocol of a server that has these connections."""
    return type("_Protocol", (LimitedProtocol,), {"places": places})
