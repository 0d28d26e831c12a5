"""A hub on 127.0.0.1 that knows the part of the API that an upload needs: ``from fake_hub import FakeHub``."""

from __future__ import annotations

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_right"


class FakeHub:
    """While entered, a server; what was uploaded is in `repositories`."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Any]] = {}
        """Id → {"private", "files": name → bytes, "messages"}."""
        self.requests: list[str] = []
        self.fail: int = 0
        """The status that every request gets, if it is not 0."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def do_POST(self) -> None:
                hub.answer(self)

            def do_PUT(self) -> None:
                hub.answer(self)

            def log_message(self, *args: Any) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = request.path.partition("?")[0]
        self.requests.append(f"{request.command} {path}")
        status, value = self.fail, {}
        error = ""
        if not status and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            status = 401
        if not status:
            status, value, error = self.result(request.command, path, body)
        data = json.dumps(value).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        if error:
            request.send_header("X-Error-Code", error)
        request.end_headers()
        request.wfile.write(data)

    def result(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any], str]:
        if (method, path) == ("POST", "/api/repos/create"):
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            private = asked.get("private", asked.get("visibility") == "private")
            self.repositories[name] = {"private": private, "files": {}, "messages": []}
            return 200, {"url": f"{self.endpoint}/{name}"}, ""
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, ""
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/preupload/main|/commit/main|/settings)?", path)
        repository = self.repositories.get(found[1]) if found else None
        if found is None or repository is None:
            return 404, {"error": "Repository not found"}, "RepoNotFound"
        if found[2] == "/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}, ""
        if found[2] == "/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "deletedFile":
                    del repository["files"][line["value"]["path"]]
                elif line["key"] == "header":
                    repository["messages"].append(line["value"]["summary"])
                else:
                    repository["files"][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return (
                200,
                {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.endpoint}/{found[1]}/commit/1"},
                "",
            )
        if found[2] == "/settings":
            asked = json.loads(body)
            repository["private"] = asked.get("private", asked.get("visibility") == "private")
            return 200, {}, ""
        siblings = [{"rfilename": name} for name in repository["files"]]
        return 200, {"id": found[1], "private": repository["private"], "siblings": siblings}, ""
