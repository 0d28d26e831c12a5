"""The server of the OpenAI API, over a tiny model."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from surogate_command_serve.application import MOST_BYTES
from surogate_command_serve.asks import RequestError
from surogate_command_serve.models import ServedModel
from surogate_command_serve.server import Server
from surogate_command_serve.worker import Worker

from surogate_core.plugin import UserError, bundles, inference, load_plugins, load_run_config
from surogate_core.service.inference import (
    generate_texts,
    named,
    prepare,
    prompt_of_messages,
    prompt_of_text,
    requests_of,
)

TOKEN = "a-token-of-the-test"
HELLO = [{"role": "user", "content": "Hello"}]
CONTEXT = 160


@dataclass(slots=True)
class Live:
    """A running server."""

    server: Server
    engine: inference.NativeEngine
    served: ServedModel

    def ask(self, path: str, body: Any = None, *, method: str = "", **headers: str) -> tuple[int, Any]:
        """(status, JSON) of a request with the token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            headers = {"Authorization": f"Bearer {TOKEN}", **headers}
            connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            connection.close()

    def complete(self, **body: Any) -> Any:
        """The answer to a completion, of a chat if it has messages."""
        status, found = self.ask("/v1/chat/completions" if "messages" in body else "/v1/completions", body)
        assert status == 200, found
        return found

    def stream(self, **body: Any) -> list[Any]:
        """The events of a streamed completion."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        connection.request("POST", path, json.dumps({**body, "stream": True}).encode(), headers)
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        *events, end = [line for line in answer.read().decode().split("\n\n") if line]
        assert end == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def expected(self, prompt: inference.Prompt, wanted: inference.PromptOptions) -> list[Any]:
        """The texts that `generate` gives."""
        requests, _ = requests_of(self.served.prepared, [prompt], wanted)
        engine = inference.NativeEngine(self.engine.weights, bundles.RolloutSettings(slots=4, context=CONTEXT))
        return generate_texts(engine, self.served.tokenizer, requests, wanted.stop)


@pytest.fixture(scope="module")
def live(hf_dir: Path) -> Iterator[Live]:
    registry, found = load_plugins(), named(str(hf_dir))
    prepared = prepare(found, load_run_config([*found.overrides, "device=cpu"], registry=registry), registry)
    engine = inference.NativeEngine(
        prepared.load(registry), bundles.RolloutSettings(slots=4, context=CONTEXT, frozen=True)
    )
    served = ServedModel(name="tiny", prepared=prepared, sampling=prepared.sampling, context=CONTEXT)
    server = Server({"tiny": served}, Worker(engine, slots=4), token=TOKEN)
    yield Live(server=server, engine=engine, served=served)
    server.close()


def test_a_completion_is_that_of_generate(live: Live) -> None:
    prompt = prompt_of_text(live.served.tokenizer, "The chain", name="prompt")
    (text,) = live.expected(
        prompt, inference.PromptOptions(max_new_tokens=12, sampling=bundles.Sampling(temperature=0))
    )
    found = live.complete(model="tiny", prompt="The chain", max_tokens=12, temperature=0, logprobs=0)
    (choice,) = found["choices"]
    assert choice["text"] == text.text
    assert choice["finish_reason"] == text.reason
    assert found["object"] == "text_completion"
    assert found["usage"] == {
        "prompt_tokens": len(prompt.ids),
        "completion_tokens": len(text.ids),
        "total_tokens": len(prompt.ids) + len(text.ids),
    }
    ends = text.reason == "stop"
    assert choice["logprobs"]["token_logprobs"] == list(text.logprobs)[: len(text.ids) - ends]
    assert live.complete(prompt=list(prompt.ids), max_tokens=12, temperature=0)["choices"][0]["text"] == text.text
    echoed = live.complete(prompt="The chain", max_tokens=12, temperature=0, echo=True)
    assert echoed["choices"][0]["text"] == "The chain" + text.text
    assert live.complete(prompt="The chain", temperature=0, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_a_chat_with_samples_and_a_seed(live: Live) -> None:
    prompt = prompt_of_messages(live.served.tokenizer, HELLO, name="messages")
    wanted = inference.PromptOptions(
        max_new_tokens=10, samples=3, sampling=bundles.Sampling(temperature=1.5, top_p=0.9, seed=5)
    )
    texts = live.expected(prompt, wanted)
    body = {"messages": HELLO, "n": 3, "max_tokens": 10, "temperature": 1.5, "top_p": 0.9}
    found = live.complete(**body, seed=5)
    assert [c["message"] for c in found["choices"]] == [{"role": "assistant", "content": t.text} for t in texts]
    assert [c["finish_reason"] for c in found["choices"]] == [t.reason for t in texts]
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    same = live.complete(**{**body, "messages": [{"role": "user", "content": parts}]}, seed=5)
    assert same["choices"] == found["choices"]
    assert live.complete(**body)["choices"] != live.complete(**body)["choices"], "without a seed samples differ"


def test_streams_say_the_same_in_parts(live: Live) -> None:
    body = {"messages": HELLO, "n": 2, "max_tokens": 10, "temperature": 1.5, "seed": 5, "logprobs": True}
    whole = live.complete(**body)
    *events, last = live.stream(**body, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert [t for c in own if c["logprobs"] for t in c["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
    assert len({event["id"] for event in events}) == 1
    body = {"prompt": ["The chain", "A wheel"], "max_tokens": 8, "temperature": 0, "logprobs": 0}
    whole, events = live.complete(**body), live.stream(**body)
    for choice in whole["choices"]:
        own = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [o for c in own for o in c["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]


def test_stop_texts_end_a_completion(live: Live) -> None:
    text = live.complete(prompt="The chain", max_tokens=20, temperature=0, ignore_eos=True)["choices"][0]["text"]
    stop = text.strip()[3:5]
    (choice,) = live.complete(prompt="The chain", max_tokens=20, temperature=0, stop=["\x00", stop])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    events = live.stream(prompt="The chain", max_tokens=20, temperature=0, stop=stop)
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


def test_clients_at_the_same_time_get_what_they_get_alone(live: Live) -> None:
    bodies = [
        {"prompt": f"Number {i}", "max_tokens": 6 + i, "temperature": 1.5, "seed": i, "n": 1 + i % 2} for i in range(8)
    ]
    alone = [live.complete(**body)["choices"] for body in bodies]
    together: dict[int, Any] = {}

    def ask(number: int) -> None:
        together[number] = live.complete(**bodies[number])["choices"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(len(bodies))] == alone


def test_conversations_that_take_turns_keep_their_beginnings(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []
    prefill = inference.NativeEngine._prefill

    def noted(self: inference.NativeEngine, fills: Any) -> Any:
        starts.extend(fill.start for fill in fills)
        return prefill(self, fills)

    live.engine.forget()
    monkeypatch.setattr(inference.NativeEngine, "_prefill", noted)
    talks = [[{"role": "user", "content": f"{word} " * 20}] for word in ("one", "two", "three")]
    for talk in talks:
        live.complete(messages=talk, max_tokens=2)
    first, starts[:] = list(starts), []
    for talk in talks:
        live.complete(messages=[*talk, {"role": "assistant", "content": "a"}, *HELLO], max_tokens=2)
    assert max(first) < 16
    assert min(starts) >= 16


def test_models_and_health(live: Live) -> None:
    status, found = live.ask("/v1/models")
    assert status == 200
    (entry,) = found["data"]
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("tiny", "model", CONTEXT)
    assert live.ask("/v1/models/tiny") == (200, entry)
    assert live.ask("/v1/models/none")[0] == 404
    assert live.ask("/health", Authorization="none") == (200, {"status": "ok"})


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}é"])
def test_a_request_without_the_token_is_refused(live: Live, given: str) -> None:
    for path, body in (("/v1/models", None), ("/v1/completions", {"prompt": "a"}), ("/anything", None)):
        status, found = live.ask(path, body, Authorization=given.encode("latin-1").decode("latin-1"))
        assert status == 401
        assert found["error"]["code"] == "invalid_api_key"
        assert TOKEN not in json.dumps(found)


def test_a_client_that_goes_away_stops_its_completion(live: Live) -> None:
    for stream in (False, True):
        body = {"prompt": "The chain", "max_tokens": 140, "ignore_eos": True, "n": 64, "temperature": 1.0}
        data = json.dumps({**body, "stream": stream}).encode()
        head = f"Host: a\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", live.server.port)) as connection:
            connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}".encode() + data)
            until(lambda: live.server.worker.counts()[0] == 4)
        until(lambda: live.server.worker.counts() == (0, 0))
    assert live.complete(prompt="The chain", max_tokens=1)


def until(holds: Any) -> None:
    """Wait for something that happens soon."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_connections_are_kept(live: Live) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", live.server.port, timeout=60)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for body in (b'{"prompt": "a", "max_tokens": 2}', b"{", b'{"prompt": "a", "max_tokens": 2}'):
        connection.request("POST", "/v1/completions", body, headers)
        used = connection.sock
        answer = connection.getresponse()
        assert answer.status == (400 if body == b"{" else 200)
        answer.read()
        assert connection.sock is used
    connection.close()


@pytest.mark.parametrize(("length", "status"), [(str(MOST_BYTES + 1), 413), ("9" * 20, 413), ("9" * 5000, 400)])
def test_bodies_that_are_too_long_are_not_read(live: Live, length: str, status: int) -> None:
    found, answer = live.ask("/v1/completions", b"", method="POST", **{"Content-Length": length})
    assert found == status
    assert ("at most" if status == 413 else "Content-Length") in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/v1/completions", "GET", 405), ("/v1/models", "POST", 405), ("/", "GET", 404), ("/v1/embeddings", "POST", 404)],
)
def test_paths_and_methods(live: Live, path: str, method: str, status: int) -> None:
    found, answer = live.ask(path, {} if method == "POST" else None, method=method)
    assert found == status
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /v1/models HTTP/2.0\r\nHost: a", 505),
        (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: a", 414),
        (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000, 431),
        (b"nonsense of a client", 400),
        (b"GET //[ HTTP/1.1\r\nHost: a", 400),
        (b"GET http://[a]/health HTTP/1.1\r\nHost: a", 400),
    ],
    ids=["version", "path", "header", "line", "address", "whole address"],
)
def test_what_is_not_http(live: Live, request_line: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", live.server.port), timeout=20) as connection:
        connection.sendall(request_line + b"\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == status
        assert json.loads(answer.read())["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:80"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "[::1]"}, 200),
        ({"Host": "[::1].evil.example"}, 403),
        ({"Host": "localhost@evil.example"}, 403),
        ({"Host": "evil.example:80"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_a_server_without_a_token_answers_no_page_of_a_browser(
    live: Live, headers: dict[str, str], status: int
) -> None:
    server = Server(live.server.models, live.server.worker, token=None)
    try:
        other = Live(server=server, engine=live.engine, served=live.served)
        assert other.ask("/v1/models", **headers)[0] == status
        assert other.ask("/health", **headers)[0] == 200
    finally:
        server.stop_listening()


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = inference.NativeEngine.serve

    def failing(self: inference.NativeEngine, arriving: Any, on_token: Any) -> None:
        tokens: list[int] = []

        def take(index: int, token: int, logprob: float) -> bool:
            tokens.append(token)
            if len(tokens) == 4:
                raise UserError("the weights are not numbers")
            return bool(on_token(index, token, logprob))

        serve(self, arriving, take)

    monkeypatch.setattr(inference.NativeEngine, "serve", failing)
    body = {"prompt": "The chain", "max_tokens": 20, "ignore_eos": True}
    status, answer = live.ask("/v1/completions", body)
    assert status == 500
    error = {"message": "the weights are not numbers", "type": "server_error", "param": None, "code": None}
    assert answer["error"] == error
    data = json.dumps({**body, "stream": True}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", live.server.port, timeout=60)
    connection.request("POST", "/v1/completions", data, {"Authorization": f"Bearer {TOKEN}"})
    last = connection.getresponse().read().decode().rstrip("\n").split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: ")) == answer


@pytest.mark.parametrize("place", ["ticket", "serve"])
def test_a_panic_of_a_library_is_an_error_of_one_request(
    live: Live, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The panics of Rust libraries are no `Exception`."""

    class Panic(BaseException):
        pass

    def fail(*arguments: Any) -> Any:
        raise Panic("secret")

    monkeypatch.setattr(ServedModel if place == "ticket" else inference.NativeEngine, place, fail)
    status, answer = live.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "secret" not in answer["error"]["message"]
    monkeypatch.undo()
    assert live.complete(prompt="a", max_tokens=1)


def test_disconnects_leave_nothing_behind(live: Live) -> None:
    def left() -> tuple[int, int]:
        return threading.active_count(), psutil.Process().num_fds()

    body = json.dumps({"prompt": "a", "max_tokens": 140, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n"
    data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    live.complete(prompt="a", max_tokens=1)
    before = left()
    for _ in range(2):
        clients = [socket.create_connection(("127.0.0.1", live.server.port)) for _ in range(32)]
        for client in clients:
            client.sendall(data)
        until(lambda: live.server.worker.counts()[0] == 4)
        for client in clients:
            client.close()
        until(lambda: live.server.worker.counts() == (0, 0))
    until(lambda: len(live.server.connections) == 0)
    assert all(now <= then for now, then in zip(left(), before, strict=True))


def test_a_larger_context_is_advised_only_if_the_model_has_one(live: Live) -> None:
    ask: Any = SimpleNamespace(max_tokens=None)
    whole = int(live.served.prepared.context)
    for context, fix in ((CONTEXT, r"larger --context\.$"), (whole, r"Fix: shorten it\.$")):
        prompt = inference.Prompt(name="prompt", ids=(1,) * context)
        with pytest.raises(RequestError, match=fix):
            replace(live.served, context=context)._room(prompt, ask)
