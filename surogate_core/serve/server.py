"""HTTP: who may ask, what is read, and answers as JSON or as server-sent events.

Each connection has a thread, which prepares requests and writes answers; the worker's thread generates.
"""

from __future__ import annotations

import hmac
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import structlog

from surogate_core.logs import record_traceback
from surogate_core.serve import LOOPBACK
from surogate_core.serve.answers import Answer, event
from surogate_core.serve.asks import Ask, RequestError, read
from surogate_core.serve.models import Served, find, usage_of
from surogate_core.serve.parts import Parts
from surogate_core.serve.worker import Ticket, Worker

log = structlog.get_logger(__name__)

MOST_BYTES = 8 << 20
"""Largest body."""
MOST_CONNECTIONS = 512
IDLE_SECONDS = 60.0
"""Longest wait for a byte of a client, and for a client that does not take its answer."""
LOOK_SECONDS = 0.25
"""Time between two looks whether a client is still there."""
QUIET_SECONDS = 10.0
"""Time after which a stream without a new token gets a comment, so that nothing between takes it for dead."""

GET_PATHS = ("/health", "/v1/models")
POST_PATHS = {"/v1/completions": False, "/v1/chat/completions": True}
"""Path → whether it is a chat."""

Note = Callable[[str], None]


class Server:
    """Answers requests until it is closed."""

    def __init__(
        self,
        models: Mapping[str, Served],
        worker: Worker,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None,
        note: Note = lambda line: None,
    ):
        """Without a token, only requests of this machine's own programs are answered. `note` receives a line for each
        answer. Port 0 takes a free one. Raises `OSError` if the port is taken.
        """
        self.models, self.worker, self.token, self.note = models, worker, token, note
        self.created = int(time.time())
        self.host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        kind = type("_Http", (_Http,), {"address_family": family})
        self._http = kind((host, port), partial(_Handler, self))
        listen = partial(self._http.serve_forever, poll_interval=0.1)
        self._thread = threading.Thread(target=listen, name="surogate-http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/v1"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and end what runs."""
        self.stop_listening()
        self.worker.close()
        self._http.wait_for_answers()

    def stop_listening(self) -> None:
        """Take no more connections."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(timeout=5)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *args: Any):
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.answering = 0
        self.changed = threading.Condition()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with suppress(OSError):
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()  # no thread has begun
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a connection broke", exc_info=True)

    def count(self, change: int) -> None:
        """One more answer, or one less, is being written."""
        with self.changed:
            self.answering += change
            self.changed.notify_all()

    def wait_for_answers(self) -> None:
        """Wait a moment until those that are asked have answered."""
        with self.changed:
            self.changed.wait_for(lambda: self.answering == 0, timeout=5)


class _GoneError(Exception):
    """The client has closed its connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = default_request_version = "HTTP/1.1"
    server_version, sys_version = "surogate", ""
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True

    def __init__(self, owner: Server, *args: Any):
        self.owner = owner
        self._has_read, self._has_answered = False, False
        super().__init__(*args)

    def handle_one_request(self) -> None:
        """One request; a client that breaks it off ends the connection."""
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def do_GET(self) -> None:
        self._has_read, self._has_answered = False, False
        http: _Http = self.server  # type: ignore[assignment]
        http.count(1)
        try:
            self._answer(urlsplit(self.path).path)
        except RequestError as refused:
            self._refuse(refused)
        except _GoneError:
            self.close_connection = True
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            log.error("a request failed", traceback=str(record_traceback("a request failed", error)))
            self._refuse(RequestError("the server failed; its log has the reason.", status=500))
        finally:
            http.count(-1)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET

    # ---------------------------------------------------------------------------- routes

    def _answer(self, path: str) -> None:
        path = path.rstrip("/") or "/"
        if path == "/health" and self.command in ("GET", "HEAD"):
            self._json(200, {"status": "ok"})
            return
        self._check_caller()
        if path in POST_PATHS:
            self._check_method("POST")
            self._complete(read(self._body(), chat=POST_PATHS[path]))
        elif path in GET_PATHS:
            self._check_method("GET")
            found = [model.entry(self.owner.created) for model in self.owner.models.values()]
            self._json(200, {"object": "list", "data": found})
        elif path.startswith("/v1/models/"):
            self._check_method("GET")
            model = find(self.owner.models, unquote(path.removeprefix("/v1/models/")))
            self._json(200, model.entry(self.owner.created))
        else:
            known = ", ".join((*GET_PATHS, *POST_PATHS))
            raise RequestError(f"{path[:200]}: there is no such path. Fix: {known}", status=404, code="not_found")

    def _check_caller(self) -> None:
        """The token; without one, a client on this machine that is no page of a browser."""
        token = self.owner.token
        if token is None:
            host = (self.headers.get("Host") or "").rpartition(":")[0].strip("[]") or self.headers.get("Host")
            if host not in LOOPBACK or "Origin" in self.headers:
                raise RequestError("a server without a token answers programs of its own machine only.", status=403)
            return
        kind, _, given = (self.headers.get("Authorization") or "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            message = "the token is wrong or missing. Fix: the header Authorization: Bearer TOKEN"
            raise RequestError(message, status=401, code="invalid_api_key")

    def _check_method(self, method: str) -> None:
        if self.command != method and not (method == "GET" and self.command == "HEAD"):
            raise RequestError(f"{self.command}: this path takes {method}.", status=405, code="method_not_allowed")

    def _body(self) -> bytes:
        given = self.headers.get("Content-Length") or ""
        if self.headers.get("Transfer-Encoding") or not (given.isascii() and given.isdigit()):
            raise RequestError("the request has no Content-Length.", status=411)
        # Python refuses to read a number of thousands of digits.
        length = int(given) if len(given) < 20 else MOST_BYTES + 1
        if length > MOST_BYTES:
            raise RequestError(f"the body is too long; at most {MOST_BYTES:,} bytes are read.", status=413)
        found = self.rfile.read(length)
        if len(found) < length:
            raise _GoneError
        self._has_read = True
        return found

    # ----------------------------------------------------------------------- completions

    def _complete(self, ask: Ask) -> None:
        model = find(self.owner.models, ask.model)
        ticket = model.ticket(ask)
        started = time.perf_counter()
        self.owner.worker.submit(ticket)
        parts = Parts(ask, model, ticket)
        try:
            if ask.stream:
                self._stream(ask, model, ticket, parts)
            else:
                for _ in self._events(ticket, parts):
                    pass
                answer = Answer(chat=ask.chat, model=model.name)
                self._json(200, answer.whole(parts.whole(), usage_of(ticket.requests, parts.tokens)))
            state = "answered"
        except (_GoneError, ConnectionError, TimeoutError):
            state = "broken off by the client"
            raise
        except RequestError as refused:
            state = f"failed: {refused}"
            raise
        finally:
            ticket.gone = True
            seconds = time.perf_counter() - started
            tokens = "1 token" if parts.tokens == 1 else f"{parts.tokens} tokens"
            self.owner.note(f"{model.name}: {tokens} in {seconds:.1f} s, {state}")

    def _events(self, ticket: Ticket, parts: Parts) -> Iterator[None]:
        """Takes what the worker has done, until all completions have ended; yields after each look."""
        looked = time.monotonic()
        while parts.open:
            with suppress(Empty):
                found = ticket.events.get(timeout=LOOK_SECONDS)
                while True:
                    if isinstance(found, RequestError):
                        raise found
                    parts.take(found)
                    found = ticket.events.get_nowait()
            if time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
                if self._is_gone():
                    raise _GoneError
            yield

    def _is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        if not poll.poll(0):
            return False
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _stream(self, ask: Ask, model: Served, ticket: Ticket, parts: Parts) -> None:
        answer = Answer(chat=ask.chat, model=model.name)
        self.close_connection = True
        self._head(200, {"Content-Type": "text/event-stream; charset=utf-8", "Connection": "close"})
        if ask.chat:
            for index in range(len(ticket.requests)):
                self.wfile.write(event(answer.opening(index)))
        written = time.monotonic()
        try:
            for _ in self._events(ticket, parts):
                data = b"".join(event(answer.chunk(choice)) for choice in parts.new())
                if not data and time.monotonic() - written > QUIET_SECONDS:
                    data = b": waiting\n\n"
                if data:
                    self.wfile.write(data)
                    written = time.monotonic()
        except RequestError as refused:
            self.wfile.write(event(refused.body()))
            raise
        if ask.usage:
            self.wfile.write(event(answer.ending(usage_of(ticket.requests, parts.tokens))))
        self.wfile.write(event("[DONE]"))

    # --------------------------------------------------------------------------- writing

    def _refuse(self, refused: RequestError) -> None:
        if self._has_answered:
            return
        extra = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(refused.status, {})
        if not self._has_read and self.command == "POST":
            # The rest of the connection is a body that nobody reads.
            self.close_connection = True
            extra = {**extra, "Connection": "close"}
        self._json(refused.status, refused.body(), extra)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Something that is not HTTP, or too long a line of it."""
        self.close_connection = True
        text = message or HTTPStatus(code).phrase
        self._json(code, RequestError(f"{text}.", status=code).body(), {"Connection": "close"})

    def _json(self, status: int, value: Mapping[str, Any], extra: Mapping[str, str] | None = None) -> None:
        body = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(extra or {})}
        self._head(status, headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}.items():
            self.send_header(name, value)
        self.end_headers()
        self._has_answered = True

    def log_message(self, format: str, *args: Any) -> None:
        """The server notes answers itself."""
