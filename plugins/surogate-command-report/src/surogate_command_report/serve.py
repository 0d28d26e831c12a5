"""The live page: a local server for one person, of the runs that it is given.

It listens on 127.0.0.1 alone, wants the token of its URL for every request, and hands out four things that it makes
itself: the page, the figures, the texts, the loads of experts. It opens no file that a request names.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import structlog

from surogate_command_report.data import AXES, experts, figures, texts
from surogate_command_report.document import live_page
from surogate_core.service.files import RunRecord, is_running, metrics_path, parsed

log = structlog.get_logger(__name__)

HOST = "127.0.0.1"

POLL_SECONDS = 1.0
"""Time between two looks at a file that may grow."""

SLICE_BYTES = 1 << 20
"""Bytes that are read from a file before other threads may run."""


class PageServer:
    """Serves the page of some runs until it is closed."""

    def __init__(self, runs: Callable[[], Sequence[RunRecord]], *, port: int = 0, token: str | None = None):
        """`runs` is asked at each request. Port 0 takes a free one. Raises `OSError` where the port is taken."""
        self.token = token or secrets.token_urlsafe(24)
        self._server = ThreadingHTTPServer((HOST, port), _handler(runs, self.token))
        self._server.daemon_threads = True
        listen = partial(self._server.serve_forever, poll_interval=0.1)
        self._thread = threading.Thread(target=listen, name="surogate-page", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The address to open, token included."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class MetricsFollower:
    """Reads a run's metrics in a thread, as far as they are written, until it is closed."""

    def __init__(self, directory: Path, *, group: str = ""):
        """Raises `UserError` for no directory."""
        self._path = metrics_path(directory)
        self._group = group
        self.record = self._empty(directory)
        self._position = 0
        self._file_id: tuple[int, int] | None = None
        self._closed = threading.Event()
        self.caught_up = threading.Event()
        """Set once all that was there has been read."""
        self._thread = threading.Thread(target=self._follow, name="surogate-follow", daemon=True)
        self._thread.start()

    def _empty(self, directory: Path) -> RunRecord:
        record = RunRecord(directory=directory, name=directory.resolve().name, group=self._group)
        record.read_files()
        record.live = is_running(directory)
        return record

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                grown = self._read()
            except OSError as error:
                log.info("the metrics cannot be read", path=str(self._path), reason=str(error))
                grown = False
            if not grown:
                self.record.live = is_running(self.record.directory)
                self.caught_up.set()
                self._closed.wait(POLL_SECONDS)

    def _read(self) -> bool:
        """Take the next lines; whether there were any."""
        if not self._path.is_file():
            return False
        status = self._path.stat()
        if self._file_id != (status.st_dev, status.st_ino) or status.st_size < self._position:
            # A resumed run replaces the file.
            self._file_id, self._position = (status.st_dev, status.st_ino), 0
            self.record = self._empty(self.record.directory)
        with self._path.open("rb") as file:
            file.seek(self._position)
            block = file.read(SLICE_BYTES)
        whole = block[: block.rfind(b"\n") + 1]
        self._position += len(whole)
        started = False
        for line in whole.splitlines():
            if (record := parsed(line)) is not None:
                started |= record.get("event") in ("run_start", "run_end")
                self.record.add(record)
        if started:
            self.record.read_files()
        return bool(whole)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(timeout=5)


# -------------------------------------------------------------------------------- server


def _handler(runs: Callable[[], Sequence[RunRecord]], token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "surogate", ""

        def do_GET(self) -> None:
            started = time.perf_counter()
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            if not self._allowed(query):
                self._send(403, "text/plain", b"403: the address that the run has shown holds a token.\n")
            elif self.command not in ("GET", "HEAD"):
                self._send(405, "text/plain", b"405: only GET.\n")
            elif url.path == "/":
                nonce = secrets.token_urlsafe(16)
                self._send(200, "text/html; charset=utf-8", live_page(nonce).encode(), policy=_policy(nonce))
            elif url.path == "/figures":
                found = figures(runs(), **_part(query))
                self._json({**found, "seconds": round(time.perf_counter() - started, 4)})
            elif url.path == "/texts":
                self._json(texts(runs()))
            elif url.path == "/experts":
                self._json({"experts": experts(runs())})
            else:
                self._send(404, "text/plain", b"404: there is no such page.\n")

        do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET

        def _allowed(self, query: Mapping[str, Sequence[str]]) -> bool:
            """The token, and a host that a page of another name cannot have been resolved to."""
            given = (query.get("token") or [""])[-1]
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            return hmac.compare_digest(given.encode(), token.encode()) and host in (HOST, "localhost")

        def _json(self, value: Mapping[str, Any]) -> None:
            self._send(200, "application/json", json.dumps(value, allow_nan=False).encode())

        def _send(self, status: int, kind: str, body: bytes, *, policy: str = "default-src 'none'") -> None:
            self.send_response(status)
            headers = {
                "Content-Type": kind,
                "Content-Length": str(len(body)),
                "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cross-Origin-Resource-Policy": "same-origin",
                "Cache-Control": "no-store",
            }
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """A request leaves no trace: its line holds the token."""

    return Handler


def _policy(nonce: str) -> str:
    return (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:"
    )


def _part(query: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The part of the curves that a request asks for, within bounds."""
    axis = (query.get("x") or ["step"])[-1]
    return {
        "begin": _bound(query, "begin", -math.inf),
        "end": _bound(query, "end", math.inf),
        "smooth": min(0.999, max(0.0, _bound(query, "smooth", 0.0))),
        "axis": axis if axis in AXES else "step",
    }


def _bound(query: Mapping[str, Sequence[str]], name: str, default: float) -> float:
    try:
        value = float(query[name][-1])
    except (KeyError, ValueError):
        return default
    return default if math.isnan(value) else value
