"""How fast a server answers others while clients send prompts that are far too long, and while others stream.

    python benchmarks/server.py MODEL [--context N] [--bytes N] [--seconds N]

Clients in a process of their own stream completions, 20 of them, and 4 others send prompts of 8 MB one after another:
as text, as a chat, as token ids and as 150,000 messages. The worst time of /health and of the gaps between the chunks
of a stream is printed, first without and then with the long prompts. Everything is on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

import surogate

STREAMS, SENDERS = 20, 4


def ask(port: int, token: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
    """The answer of a server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST" if body else "GET", path, body, {"Authorization": f"Bearer {token}"})
    return connection.getresponse()


def bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """Name → (path, body) of requests that are too long."""
    text, chat = "the quick brown fox jumps over the lazy dog " * (size // 44), "/v1/chat/completions"
    said = {"role": "user", "content": "Hello"}
    every: dict[str, tuple[str, Any]] = {
        "text": ("/v1/completions", {"prompt": text}),
        "chat": (chat, {"messages": [{"role": "user", "content": text}]}),
        "ids": ("/v1/completions", {"prompt": [5] * (size // 4)}),
        "messages": (chat, {"messages": [said] * min(150_000, size // 44)}),
    }
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in every.items()}


def clients(port: int, token: str, size: int, seconds: float, out: Any) -> None:
    """The clients, until the time is over; puts their figures into `out`."""
    end, threads = time.monotonic() + seconds, []
    health: list[float] = []
    gaps: list[float] = []
    sent: dict[str, list[tuple[int, float]]] = {}

    def look() -> None:
        while time.monotonic() < end:
            begun = time.perf_counter()
            ask(port, token, "/health", None).read()
            health.append(time.perf_counter() - begun)
            time.sleep(0.02)

    def stream() -> None:
        body = json.dumps({"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}).encode()
        while time.monotonic() < end:
            answer, last = ask(port, token, "/v1/completions", body), None
            for line in answer:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    gaps.extend([now - last] if last is not None else [])
                    last = now

    def send(path: str, body: bytes, name: str) -> None:
        while time.monotonic() < end:
            begun = time.perf_counter()
            answer = ask(port, token, path, body)
            answer.read()
            sent.setdefault(name, []).append((answer.status, time.perf_counter() - begun))

    works: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(look, ()), *[(stream, ())] * STREAMS]
    if size:
        works += [(send, (path, body, name)) for name, (path, body) in bodies(size).items()]
    for function, arguments in works:
        threads.append(threading.Thread(target=function, args=arguments))
        threads[-1].start()
    for thread in threads:
        thread.join()
    answers = {name: (len(all_), sorted({status for status, _ in all_})) for name, all_ in sent.items()}
    out.put((len(health), max(health), len(gaps), max(gaps, default=0.0), answers))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--bytes", type=int, default=8_000_000)
    parser.add_argument("--seconds", type=float, default=30)
    given = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with surogate.serve(given.model, device="cpu", context=given.context, slots=STREAMS) as server:
        for size in (0, given.bytes):
            out = spawn.Queue()
            process = spawn.Process(target=clients, args=(server.port, server.token, size, given.seconds, out))
            process.start()
            count, health, chunks, gap, answers = out.get()
            process.join()
            memory = psutil.Process().memory_info().rss / 2**20
            print(f"prompts of {size:,} bytes: /health {count} times, worst {health:.3f} s; {chunks} chunks, worst gap")
            print(f"  {gap:.3f} s; long prompts answered (number, status): {answers}; {memory:,.0f} MiB")


if __name__ == "__main__":
    main()
