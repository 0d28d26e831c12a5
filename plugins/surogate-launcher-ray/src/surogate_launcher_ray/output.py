"""What rank 0 prints on its machine, kept until the driver takes it."""

from __future__ import annotations

import os
import threading
from collections import deque
from types import TracebackType

DRAIN_SECONDS = 2.0
"""The time in which the last output is read after the ranks have ended: a process of theirs may keep the pipe open."""


class Output:
    """Two pipes with a reader each. Enter it for the descriptors that take standard output and errors."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, bytes]] = deque()
        self._readers: list[threading.Thread] = []
        self._ends: list[int] = []

    def __enter__(self) -> tuple[int, int]:
        for stream in (1, 2):
            read, write = os.pipe()
            self._ends.append(write)
            self._readers.append(threading.Thread(target=self._read, args=(read, stream), daemon=True))
        for reader in self._readers:
            reader.start()
        return self._ends[0], self._ends[1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self._ends:
            os.close(end)
        for reader in self._readers:
            reader.join(DRAIN_SECONDS)

    def take(self) -> list[tuple[int, bytes]]:
        """(1 or 2, text) of everything since the last call, in order."""
        return [self._parts.popleft() for _ in range(len(self._parts))]

    def _read(self, descriptor: int, stream: int) -> None:
        while part := os.read(descriptor, 65536):
            self._parts.append((stream, part))
        os.close(descriptor)
