"""Errors of requests."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """A request that gets an error instead of an answer, in the form of the OpenAI API."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON of the error."""
        kinds = {429: "rate_limit_error", 401: "authentication_error"}
        is_own = self.status >= 500 and self.status not in (501, 505)  # those say what a client must not ask
        kind = kinds.get(self.status, "server_error" if is_own else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
