"""A server that listens: uvicorn in a thread, with the models, the thread that generates and the one that tokenises."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Self

import uvicorn

from surogate_command_serve.application import Application
from surogate_command_serve.limits import IDLE_SECONDS, MOST_HEAD_BYTES, Connections, protocol_with
from surogate_command_serve.models import ServedModel
from surogate_command_serve.preparing import Preparer
from surogate_command_serve.worker import Worker

BACKLOG = 1024
"""Connections that wait to be taken."""
AT_ONCE = 16
"""Connections that are taken before those that are there are read again."""
CLOSE_SECONDS = 5.0
"""Time in which those that are asked may answer, when the server ends."""

Note = Callable[[str], None]


class Server:
    """Answers requests until it is closed."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
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
        listener = _listener(host, port)
        self.port = int(listener.getsockname()[1])
        """The port that it listens on."""
        self.connections = Connections()
        self.preparer = Preparer()
        self._http = _Http(_config(Application(self), self.connections))
        self._thread = threading.Thread(target=self._run, args=(listener,), name="surogate-http", daemon=True)
        self._thread.start()

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
        self._thread.join(timeout=CLOSE_SECONDS)
        self._http.force_exit = True
        self._thread.join(timeout=CLOSE_SECONDS)

    def stop_listening(self) -> None:
        """Take no more connections; requests that are in progress go on."""
        self._http.should_exit = True
        self._http.deaf.wait(timeout=CLOSE_SECONDS)

    def _run(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self._http.serve([listener]))
        finally:
            self.preparer.close()


class _Http(uvicorn.Server):
    """uvicorn, which says when it no longer listens."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.deaf = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. asyncio takes as many connections at once as may wait, so it gets the smaller number first."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listening sockets, then wait for answers."""
        for server in self.servers:
            server.close()
        for one in sockets or ():
            one.close()
        self.deaf.set()
        await super().shutdown(sockets)


def _listener(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _config(application: Application, connections: Connections) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=protocol_with(connections),
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=AT_ONCE,
        timeout_keep_alive=int(IDLE_SECONDS),
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
    )
