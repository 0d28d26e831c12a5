"""Requests to a server: JSON over HTTP with a time limit and further attempts."""

from __future__ import annotations

import json
import math
import socket
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from threading import Event, Lock
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from surogate_core.plugin import MachineError, SurogateError, UserError

LONGEST_ANSWER = 2**28
"""Bytes of the longest answer that is read."""
_SHOWN = 300
"""Characters of a server's message that are shown."""


class Refused(MachineError):  # noqa: N818 - what the server did
    """The server answered, with an HTTP status that says no."""

    def __init__(self, status: int, message: str, url: str, path: str):
        self.status = status
        super().__init__(f"rollout vllm: {url}{path} answered HTTP {status}: {message}")


class Client:
    """A server's address, and the requests that are open."""

    def __init__(self, url: str, *, key: str | None, timeout: float, retries: int, pause: float = 0.5):
        """`pause`: seconds before the second attempt; each further pause is twice as long, at most 30 s."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port, wrong = parts.port, parts.query or parts.username or not parts.hostname
        except ValueError:
            port, wrong = None, True
        if wrong or parts.scheme not in ("http", "https"):
            raise UserError(f"rollout.url: {url!r} is no address of a server. Fix: http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._https, self._host, self._port = parts.scheme == "https", parts.hostname or "", port
        self._prefix = urlsplit(self.url).path
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._timeout, self._retries, self._pause = timeout, retries, pause
        self._open: set[HTTPConnection] = set()
        self._lock, self._stopped = Lock(), Event()

    def get(self, path: str) -> Any:
        """The answer to a GET request, tried once."""
        return self._tried("GET", path, None, retries=0)

    def post(self, path: str, values: Any, *, retries: int | None = None) -> Any:
        """The answer to a POST request: a JSON value, or text if it is none.

        Raises `Refused` for HTTP 4xx, and `MachineError` when every attempt failed.
        """
        return self._tried("POST", path, values, retries=self._retries if retries is None else retries)

    def tell(self, path: str, values: Any, *, seconds: float) -> None:
        """Make a POST request whose answer does not matter; waits at most `seconds` for it."""
        with suppress(OSError, HTTPException, SurogateError):
            self._once("POST", path, values, min(seconds, self._timeout))

    def stop(self) -> None:
        """Break off the open requests; `resume` allows new ones."""
        self._stopped.set()
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def resume(self) -> None:
        """Allow requests again after `stop`."""
        self._stopped.clear()

    def _tried(self, method: str, path: str, values: Any, *, retries: int) -> Any:
        for attempt in range(retries + 1):
            try:
                return self._once(method, path, values, self._timeout)
            except Refused as error:
                if error.status != 429 and error.status < 500:
                    raise
                failure: Exception = error
            except (OSError, HTTPException) as error:
                failure = error
            if self._stopped.is_set() or attempt == retries:
                break
            self._stopped.wait(min(self._pause * 2**attempt, 30))
        if isinstance(failure, SurogateError):
            raise failure
        times = f" after {retries + 1} attempts" if retries else ""
        raise MachineError(
            f"rollout vllm: {self.url}{path} does not answer{times}: {_said(failure, self._timeout)}. "
            "Fix: start the server, or correct rollout.url"
        ) from failure

    def _once(self, method: str, path: str, values: Any, timeout: float) -> Any:
        kind = HTTPSConnection if self._https else HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout)
        with self._lock:
            self._open.add(connection)
        try:
            if self._stopped.is_set():
                raise ConnectionAbortedError("the run stops")
            ends = time.monotonic() + timeout
            body = None if values is None else json.dumps(values).encode()
            connection.request(method, self._prefix + path, body, self._headers)
            with connection.getresponse() as response:
                data = bytearray()
                while part := response.read1(2**20):
                    data += part
                    if len(data) > LONGEST_ANSWER:
                        raise HTTPException(f"the answer is longer than {LONGEST_ANSWER:,} bytes")
                    if time.monotonic() > ends:
                        raise TimeoutError
                if response.length:
                    raise HTTPException("the connection ended within the answer")
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        text = data.decode(errors="replace")
        if response.status >= 300:
            raise Refused(response.status, _message(text), self.url, path)
        try:
            return json.loads(text)
        except ValueError:
            return text


def _said(error: Exception, timeout: float) -> str:
    """What went wrong, in words."""
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:g} s"
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text or type(error).__name__


def _message(text: str) -> str:
    """The message in a server's answer, on one line."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    for key in ("error", "detail", "message"):
        if isinstance(values, dict) and key in values:
            values = values[key]
    found = " ".join((values if isinstance(values, str) else text).split())
    return found if len(found) <= _SHOWN else f"{found[:_SHOWN]}…"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
