"""Requests over HTTP: who may ask, which paths there are, and what is read of a request."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from surogate_command_serve.access import LOOPBACK
from surogate_command_serve.asks import RequestError
from surogate_command_serve.limits import MOST_HEAD_BYTES
from surogate_command_serve.models import find
from surogate_command_serve.streaming import ClientGoneError, answer, as_json, send_json, while_connected
from surogate_core.service.config import record_traceback

if TYPE_CHECKING:
    from surogate_command_serve.server import Server

log = structlog.get_logger(__name__)

MOST_BYTES = 8 << 20
"""Largest body."""
BODY_SECONDS = 120.0
"""Time for a body."""
MOST_TARGET_BYTES = 8192
DRAIN_SECONDS = 1.0
"""Time in which the body of a refused request is read and dropped, so that its client reads why."""

GET_PATHS = ("/health", "/v1/models")
POST_PATHS = {"/v1/completions": False, "/v1/chat/completions": True}
"""Path → whether it is a chat."""
_HOST = re.compile(r"\[(?P<six>[^\]]*)\](?::\d*)?|(?P<name>[^:\[\]]*)(?::\d*)?|(?P<bare>[0-9a-fA-F:]+)")


class Application:
    """The server's paths, as an ASGI application."""

    def __init__(self, owner: Server):
        self.owner = owner
        gets = {"/health": self._health, "/v1/models": self._models, "/v1/models/{name:path}": self._model}
        routes = [Route(path, _Endpoint(call), methods=["GET"]) for path, call in gets.items()]
        for path, chat in POST_PATHS.items():
            routes.append(Route(path, _Endpoint(partial(self._complete, chat)), methods=["POST"]))
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every error becomes JSON."""
        request = Exchange(scope, receive, send)
        try:
            request.check_head()
            path = _path_of(scope)
            if path != "/health" or scope["method"] not in ("GET", "HEAD"):
                self._check_caller(request.headers)
            await self._router({**scope, "path": path, "app": self}, request.receive, request.send)
        except RequestError as refused:
            await request.refuse(refused)
        except HTTPException as error:
            allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
            await request.refuse(_no_route(scope, allowed), {"Allow": allowed} if allowed else None)
        except (ClientGoneError, ClientDisconnect):
            return
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also the panics of a tokenizer, which are no `Exception`
            log.error("a request failed", traceback=str(record_traceback("a request failed", error)))
            await request.refuse(RequestError("the server failed; its log has the reason.", status=500))

    def _check_caller(self, headers: Headers) -> None:
        """The token; without one, a client on this machine that is no page of a browser."""
        token = self.owner.token
        if token is None:
            found = _HOST.fullmatch(headers.get("host", ""))
            host = next((part for part in found.groups() if part), "") if found else ""
            if host.lower() not in LOOPBACK or "origin" in headers:
                raise RequestError("a server without a token answers programs of its own machine only.", status=403)
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            message = "the token is wrong or missing. Fix: the header Authorization: Bearer TOKEN"
            raise RequestError(message, status=401, code="invalid_api_key")

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, as_json({"status": "ok"}))

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = [model.entry(self.owner.created) for model in self.owner.models.values()]
        await send_json(send, 200, as_json({"object": "list", "data": found}))

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = find(self.owner.models, scope["path_params"]["name"])
        await send_json(send, 200, as_json(model.entry(self.owner.created)))

    async def _complete(self, chat: bool, scope: Scope, receive: Receive, send: Send) -> None:
        body = await body_of(Request(scope, receive))
        await while_connected(receive, answer(self.owner, body, chat=chat, send=send))


class _Endpoint:
    """An ASGI application of a function, which a route calls as it is."""

    def __init__(self, call: Callable[[Scope, Receive, Send], Awaitable[None]]):
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._call(scope, receive, send)


class Exchange:
    """A request and its answer; the connection of a request whose body is not read is closed behind the answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.scope, self.headers = scope, Headers(scope=scope)
        self._receive, self._send = receive, send
        self._coded = "transfer-encoding" in self.headers
        """A proxy may see another end of such a request."""
        self._unread = self._coded or self.headers.get("content-length", "0") != "0"
        self._started = False

    def check_head(self) -> None:
        """Refuse a head that is too long, or of another version."""
        if self.scope["http_version"] not in ("1.0", "1.1"):
            raise RequestError("this server speaks HTTP/1.1.", status=505)
        if len(self.scope["raw_path"]) + len(self.scope["query_string"]) > MOST_TARGET_BYTES:
            raise RequestError(f"the path has more than {MOST_TARGET_BYTES:,} bytes.", status=414)
        if sum(len(name) + len(value) for name, value in self.scope["headers"]) > MOST_HEAD_BYTES:
            raise RequestError(f"the headers have more than {MOST_HEAD_BYTES:,} bytes.", status=431)

    async def receive(self) -> Message:
        """The next message of the client."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._unread = False
        return message

    async def send(self, message: Message) -> None:
        """Send a message."""
        if message["type"] == "http.response.start":
            self._started = True
            if self._unread or self._coded:
                message["headers"].append((b"connection", b"close"))
        await self._send(message)

    async def refuse(self, refused: RequestError, extra: Mapping[str, str] | None = None) -> None:
        """Answer with an error, unless an answer has begun, which then breaks off."""
        if self._started:
            return
        if self._unread:
            await self._drain()
        own = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(refused.status, {})
        await send_json(self.send, refused.status, as_json(refused.body()), {**own, **(extra or {})})

    async def _drain(self) -> None:
        """Read a body that nobody wants: a client that is still sending does not see an answer."""
        if self.headers.get("expect"):
            return  # the client waits before it sends
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                left = 2 * MOST_BYTES
                while self._unread and left > 0:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        return
                    left -= len(message.get("body", b""))


def _path_of(scope: Scope) -> str:
    """The path, also of a request that has a whole address as its target; raises `RequestError`."""
    try:
        return urlsplit(scope["path"]).path.rstrip("/") or "/"
    except ValueError as error:
        raise RequestError(f"the path is no part of an address: {error}.") from error


def _no_route(scope: Scope, allowed: str) -> RequestError:
    """The error of a path that there is not, or that takes other methods."""
    if allowed:
        return RequestError(f"{scope['method']}: this path takes {allowed}.", status=405, code="method_not_allowed")
    known = ", ".join((*GET_PATHS, *POST_PATHS))
    return RequestError(f"{scope['path'][:200]}: there is no such path. Fix: {known}", status=404, code="not_found")


async def body_of(request: Request) -> bytes:
    """The body of a request; raises `RequestError`."""
    given = request.headers.get("content-length", "")
    if "transfer-encoding" in request.headers or not (given.isascii() and given.isdigit()):
        raise RequestError("the request has no Content-Length.", status=411)
    if int(given) > MOST_BYTES:
        raise RequestError(f"the body is too long; at most {MOST_BYTES:,} bytes are read.", status=413)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.body()
    except TimeoutError:
        raise RequestError(f"the body took more than {BODY_SECONDS:g} s.", status=408) from None
