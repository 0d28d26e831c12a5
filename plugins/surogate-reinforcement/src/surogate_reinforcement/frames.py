"""Messages between a pool and its workers: JSON with its length before it, through pipes."""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Callable
from typing import Any

LARGEST = 16 << 20
"""Bytes of a message."""
_HEAD = struct.Struct("=Q")
_SLICE = 0.2
"""Seconds between two looks at a process that may have ended."""


class LateError(Exception):
    """The other side took too long."""


class GoneError(Exception):
    """The other side is not there any more, or what it sends is no message."""


class TooLargeError(Exception):
    """The message is too large to send."""


def packed(value: Any) -> bytes:
    """A message; raises `TooLargeError`, `ValueError` or `TypeError`."""
    body = json.dumps(value, allow_nan=False).encode()
    if len(body) > LARGEST:
        raise TooLargeError(f"{len(body)} bytes")
    return _HEAD.pack(len(body)) + body


class Pipe:
    """Two ends of pipes, to read messages from and to write them to."""

    def __init__(self, reading: int, writing: int, alive: Callable[[], bool] | None = None) -> None:
        self._reading, self._writing, self._alive = reading, writing, alive
        if alive is not None:
            os.set_blocking(reading, False)
            os.set_blocking(writing, False)

    def send(self, message: bytes, deadline: float | None = None) -> None:
        """Write a message by a time of `time.monotonic`; None waits for ever."""
        left = memoryview(message)
        while left:
            self._wait(self._writing, select.POLLOUT, deadline)
            try:
                left = left[os.write(self._writing, left) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise GoneError from error

    def receive(self, deadline: float | None = None) -> Any:
        """The next message."""
        (length,) = _HEAD.unpack(self._exactly(_HEAD.size, deadline))
        if length > LARGEST:
            raise GoneError
        try:
            return json.loads(self._exactly(length, deadline))
        except (ValueError, RecursionError) as error:
            raise GoneError from error

    def close(self) -> None:
        for end in (self._reading, self._writing):
            os.close(end)

    def _exactly(self, length: int, deadline: float | None) -> bytes:
        found = bytearray()
        while len(found) < length:
            self._wait(self._reading, select.POLLIN, deadline)
            try:
                part = os.read(self._reading, min(length - len(found), 1 << 20))
            except BlockingIOError:
                continue
            if not part:
                raise GoneError
            found += part
        return bytes(found)

    def _wait(self, end: int, event: int, deadline: float | None) -> None:
        if deadline is None or self._alive is None:
            return
        poll = select.poll()
        poll.register(end, event)
        while True:
            left = deadline - time.monotonic()
            # What a process wrote before it ended is still in the pipe.
            was_alive = self._alive()
            if poll.poll(1000 * min(max(left, 0), _SLICE)):
                return
            if left <= 0:
                raise LateError
            if not was_alive:
                raise GoneError
