"""A server that speaks vLLM's HTTP and computes with the kit's tiny model; it can misbehave."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from surogate_core.plugin import bundles, inference
from surogate_core.service.inference import Weights
from surogate_testing import tiny

BASE = "tiny"


class FakeVllm:
    """Base weights as the tests' trainer has them; adapters are read from their directories."""

    def __init__(self) -> None:
        self.faults: set[str] = set()
        self.failures = 0
        """Number of completions that fail before one succeeds."""
        self.adapters: dict[str, Path] = {}
        self.loads: list[str] = []
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.context = 4096
        self.processed = False
        """Whether log-probabilities are those after the temperature: ``--logprobs-mode processed_logprobs``."""
        self._engines: dict[str, inference.NativeEngine] = {}
        self._first: dict[str, torch.Tensor] | None = None
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"fake": self})
        self.server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def engine(self, model: str) -> inference.NativeEngine:
        if model not in self._engines:
            path = self.adapters.get(model)
            tensors = load_file(path / "adapter_model.safetensors") if path else None
            if "ignores updates" in self.faults:
                tensors = self._first = self._first or tensors
            base = tiny.random_source(1 if "another base" in self.faults else 0)

            def source(spec: Any) -> torch.Tensor:
                if spec.role != "adapter":
                    return base(spec)
                return torch.zeros(spec.shape) if tensors is None else tensors[f"base_model.model.{spec.hf_name}"]

            weights = Weights.load(tiny.assembly(lora=tiny.lora()), source)
            self._engines[model] = inference.NativeEngine(weights, bundles.RolloutSettings(slots=4, context=64))
        return self._engines[model]

    # --------------------------------------------------------------------------- answers

    def models(self) -> dict[str, Any]:
        rows = [{"id": BASE, "parent": None, "max_model_len": self.context}]
        hidden = "hides adapters" in self.faults
        return {"data": rows + [{"id": name, "parent": BASE} for name in self.adapters if not hidden]}

    def load(self, values: dict[str, Any]) -> tuple[int, Any]:
        if "no updates" in self.faults:
            return 404, {"detail": "Not Found"}
        if "small rank" in self.faults:
            return 400, {"error": {"message": "LoRA rank 4 is greater than max_lora_rank 1."}}
        self.adapters[values["lora_name"]] = Path(values["lora_path"])
        self.loads.append(values["lora_name"])
        return 200, f"Success: LoRA adapter '{values['lora_name']}' added successfully."

    def unload(self, values: dict[str, Any]) -> tuple[int, Any]:
        del self.adapters[values["lora_name"]]
        return 200, "Success"

    def complete(self, values: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.seen.append(values)
            if self.failures:
                self.failures -= 1
                return 503, {"error": {"message": "busy"}}
            if values["model"] != BASE and values["model"] not in self.adapters:
                return 404, {"error": {"message": f"The model `{values['model']}` does not exist."}}
            if "prompt_logprobs" in values:
                choice = self._scored(values)
            else:
                choice = self._completed(values)
        choice["prompt_token_ids"] = [0, *values["prompt"]] if "adds a token" in self.faults else values["prompt"]
        return 200, {"choices": [choice]}

    def _scored(self, values: dict[str, Any]) -> dict[str, Any]:
        document = values["prompt"]
        (found,) = self.engine(values["model"]).logprobs([document])
        entries = [{str(t): {"logprob": v, "rank": 1}} for t, v in zip(document[1:], found, strict=True)]
        return {"token_ids": [0], "finish_reason": "length", "prompt_logprobs": [None, *entries]}

    def _completed(self, values: dict[str, Any]) -> dict[str, Any]:
        assert values["ignore_eos"]
        sampling = bundles.Sampling(
            temperature=values["temperature"],
            top_k=max(values["top_k"], 0),
            top_p=values["top_p"],
            seed=values["seed"],
            tempered_logprobs=self.processed,
        )
        request = bundles.Request(
            prompt=tuple(values["prompt"]),
            max_new_tokens=values["max_tokens"],
            sampling=sampling,
            stop_ids=frozenset(values["stop_token_ids"]),
        )
        (found,) = self.engine(values["model"]).generate([request])
        ids, logprobs, reason = list(found.ids), list(found.logprobs), found.reason
        if "forgets ids" in self.faults:
            return {"text": "…", "finish_reason": reason}
        if "shortens" in self.faults:
            ids, logprobs = ids[:-1], logprobs[:-1]
        if "nan" in self.faults:
            logprobs[0] = float("nan")
        if "too few" in self.faults:
            logprobs.pop()
        if "aborts" in self.faults:
            reason = "abort"  # type: ignore[assignment]
        if "stops anywhere" in self.faults:
            reason = "stop"
        return {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that a test broke off says nothing."""


class _Handler(BaseHTTPRequestHandler):
    fake: FakeVllm

    def log_message(self, *arguments: Any) -> None: ...

    def do_GET(self) -> None:
        self.fake.headers.append(dict(self.headers))
        self._answer(200, self.fake.models())

    def do_POST(self) -> None:
        values = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/load_lora_adapter":
            self._answer(*self.fake.load(values))
        elif self.path == "/v1/unload_lora_adapter":
            self._answer(*self.fake.unload(values))
        elif "drops" in self.fake.faults and "prompt_logprobs" not in values:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self._answer(*self.fake.complete(values))

    def _answer(self, status: int, values: Any) -> None:
        data = json.dumps(values).encode()
        self.send_response(status)
        cut = "cuts answers" in self.fake.faults and self.path == "/v1/completions"
        self.send_header("Content-Length", str(len(data) + 10 if cut else len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    server = FakeVllm()
    yield server
    server.close()
