"""Requests to a server of this process."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def ask(server: Any, token: str = "", **body: Any) -> Any:
    """The answer to a request for completions, with the server's own token unless another is given."""
    headers = {"Authorization": f"Bearer {token or server.token}"}
    request = urllib.request.Request(f"{server.url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())
