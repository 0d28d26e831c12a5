"""Completions over HTTP: a whole answer, or server-sent events, until the client has gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive, Send

from surogate_command_serve.answers import Answer, event
from surogate_command_serve.asks import Ask, RequestError, read
from surogate_command_serve.models import ServedModel, find, usage_of
from surogate_command_serve.parts import TicketParts
from surogate_command_serve.preparing import check_sizes
from surogate_command_serve.worker import Ticket

if TYPE_CHECKING:
    from surogate_command_serve.server import Server

T = TypeVar("T")
QUIET_SECONDS = 10.0
"""Time after which a stream without a new token gets a comment, so that nothing between takes it for dead."""
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}


class ClientGoneError(Exception):
    """The client has closed its connection."""


class Bell:
    """Wakes a coroutine from another thread; many rings before it wakes are one."""

    def __init__(self) -> None:
        self._loop, self._event, self._rung = asyncio.get_running_loop(), asyncio.Event(), False

    def ring(self) -> None:
        """Wake the coroutine, from any thread."""
        if not self._rung:
            self._rung = True
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, seconds: float) -> bool:
        """Whether it has been rung within this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        self._rung = False
        return True


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes; then raises `ClientGoneError`."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def prepared(models: Mapping[str, ServedModel], body: bytes, *, chat: bool) -> tuple[Ask, ServedModel, Ticket]:
    """A body as completions to make; raises `RequestError`."""
    ask = read(body, chat=chat)
    model = find(models, ask.model)
    check_sizes(model, ask)
    return ask, model, model.ticket(ask)


async def answer(owner: Server, body: bytes, *, chat: bool, send: Send) -> None:
    """Answer a request for completions; raises `RequestError` before anything is sent."""
    ask, model, ticket = await owner.preparer.call(len(body), partial(prepared, owner.models, body, chat=chat))
    del body
    bell = Bell()
    ticket.wake = bell.ring
    parts = TicketParts(ask, model, ticket)
    started = time.perf_counter()
    owner.worker.submit(ticket)
    state = "broken off by the client"
    try:
        made = Answer(chat=ask.chat, model=model.name)
        if ask.stream:
            await _stream(ask, made, ticket, parts, bell, send)
        else:
            async for _ in _events(ticket, parts, bell):
                pass
            await send_json(send, 200, await asyncio.to_thread(_whole, made, parts, ticket))
        state = "answered"
    except RequestError as refused:
        state = f"failed: {refused}"
        if not ask.stream:
            raise
    finally:
        ticket.gone = True
        seconds = time.perf_counter() - started
        tokens = "1 token" if parts.tokens == 1 else f"{parts.tokens} tokens"
        owner.note(f"{model.name}: {tokens} in {seconds:.1f} s, {state}")


def _whole(made: Answer, parts: TicketParts, ticket: Ticket) -> bytes:
    return as_json(made.whole(parts.whole(), usage_of(ticket.requests, parts.tokens)))


async def _events(ticket: Ticket, parts: TicketParts, bell: Bell) -> AsyncIterator[None]:
    """Takes what the worker has done, until all completions have ended; yields after each time."""
    while parts.open:
        await bell.wait(QUIET_SECONDS)
        with suppress(Empty):
            while True:
                found = ticket.events.get_nowait()
                if isinstance(found, RequestError):
                    raise found
                parts.take(found)
        yield


async def _stream(ask: Ask, made: Answer, ticket: Ticket, parts: TicketParts, bell: Bell, send: Send) -> None:
    """Send the chunks of an answer as they are made; an error in the middle is the last one."""

    async def write(data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    await send({"type": "http.response.start", "status": 200, "headers": headers(EVENTS)})
    if ask.chat:
        await write(b"".join(event(made.opening(index)) for index in range(len(ticket.requests))))
    written, failed = time.monotonic(), None
    try:
        async for _ in _events(ticket, parts, bell):
            data = b"".join(event(made.chunk(choice)) for choice in parts.new())
            if not data and time.monotonic() - written >= QUIET_SECONDS:
                data = b": waiting\n\n"
            if data:
                await write(data)
                written = time.monotonic()
        if ask.usage:
            await write(event(made.ending(usage_of(ticket.requests, parts.tokens))))
        await write(event("[DONE]"))
    except RequestError as refused:
        failed = refused
        await write(event(refused.body()))
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    if failed is not None:
        raise failed


def as_json(value: Any) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


async def send_json(send: Send, status: int, body: bytes, extra: Mapping[str, str] | None = None) -> None:
    """Send a whole answer."""
    named = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(extra or {})}
    await send({"type": "http.response.start", "status": status, "headers": headers(named)})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def headers(named: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """The headers of an answer, with those that all answers have."""
    every = {**named, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return [(name.lower().encode(), value.encode()) for name, value in every.items()]
