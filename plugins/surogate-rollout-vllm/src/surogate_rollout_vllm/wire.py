"""What is sent to a server and what it answers, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from surogate_core.plugin import MachineError, bundles
from surogate_rollout_vllm.client import Client, is_number

COMPLETIONS = "/v1/completions"


def seed_of(request: bundles.Request) -> int:
    """A number below 2**63 of the keys that decide a request's random choices."""
    keys = np.random.SeedSequence([request.sampling.seed & 0xFFFFFFFFFFFFFFFF, request.number, request.sample])
    return int(keys.generate_state(1, np.uint64)[0]) >> 1


def values_of(request: bundles.Request, model: str) -> dict[str, Any]:
    """The body of a request for a completion. Every value that a server has a default for is set."""
    sampling = request.sampling
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed_of(request),
        # The stop tokens are these and no others.
        "ignore_eos": True,
        "stop_token_ids": sorted(request.stop_ids),
        "logprobs": 1,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
    }


def completed(client: Client, request: bundles.Request, model: str) -> bundles.Completion:
    """The server's completion of a request."""
    answer = client.post(COMPLETIONS, values_of(request, model))
    choice = _choice(client, answer, request.prompt)
    ids = choice.get("token_ids")
    if ids is None:
        _wrong(client, "it sends no token ids. Fix: vLLM 0.10.2 or later")
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        _wrong(client, "its token ids are no list of numbers")
    if not 0 < len(ids) <= request.max_new_tokens:
        _wrong(client, f"{len(ids)} tokens for max_tokens={request.max_new_tokens}")
    found = choice.get("logprobs")
    values = found.get("token_logprobs") if isinstance(found, dict) else None
    if not isinstance(values, list) or len(values) != len(ids):
        _wrong(client, f"{len(values) if isinstance(values, list) else 'no'} log-probabilities of {len(ids)} tokens")
    if not all(is_number(value) and value <= 1e-3 for value in values):
        _wrong(client, "a log-probability is not finite or above 0")
    reason = _reason(client, request, ids, choice.get("finish_reason"))
    return bundles.Completion(ids=tuple(ids), logprobs=tuple(min(float(v), 0.0) for v in values), reason=reason)


def _reason(client: Client, request: bundles.Request, ids: Sequence[int], reason: Any) -> bundles.Reason:
    early = [token for token in ids[:-1] if token in request.stop_ids]
    if early:
        _wrong(client, f"it went on after stop token {early[0]}")
    if reason == "stop":
        if ids[-1] not in request.stop_ids:
            _wrong(client, f"it stopped at token {ids[-1]}, which is no stop token")
        return "stop"
    if reason != "length":
        _wrong(client, f"it ended a completion with finish_reason={reason!r}")
    if len(ids) < request.max_new_tokens:
        _wrong(
            client,
            f"it ended after {len(ids)} of {request.max_new_tokens} tokens. Fix: serve with a larger "
            "--max-model-len, or fewer tokens a completion",
        )
    # A stop token in the last place allowed ends the completion, whatever the server calls it.
    return "stop" if ids[-1] in request.stop_ids else "length"


def scored(client: Client, model: str, document: Sequence[int]) -> list[float]:
    """The log-probability of every token of a document but its first."""
    values = {
        "model": model,
        "prompt": list(document),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    choice = _choice(client, client.post(COMPLETIONS, values), document)
    found = choice.get("prompt_logprobs")
    if not isinstance(found, list) or len(found) != len(document):
        _wrong(client, f"prompt_logprobs of {len(document)} tokens are missing or of another length")
    scores = []
    for token, entry in zip(document[1:], found[1:], strict=True):
        one = entry.get(str(token)) if isinstance(entry, dict) else None
        value = one.get("logprob") if isinstance(one, dict) else None
        if not is_number(value):
            _wrong(client, f"prompt_logprobs have no finite value of token {token}")
        scores.append(float(value))
    return scores


def models_of(answer: Any) -> list[tuple[str, bool]]:
    """(name, whether it is an adapter) of each model in the answer of ``/v1/models``."""
    data = answer.get("data") if isinstance(answer, dict) else None
    found = [one for one in data if isinstance(one, dict)] if isinstance(data, list) else []
    return [(str(one.get("id")), one.get("parent") is not None) for one in found]


def _choice(client: Client, answer: Any, prompt: Sequence[int]) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        _wrong(client, "an answer without its one choice")
    choice: dict[str, Any] = choices[0]
    seen = choice.get("prompt_token_ids")
    if seen is not None and seen != list(prompt):
        _wrong(client, f"it read {len(seen)} other prompt tokens than the {len(prompt)} that were sent")
    return choice


def _wrong(client: Client, what: str) -> NoReturn:
    raise MachineError(f"rollout vllm: {client.url}{COMPLETIONS}: {what}")
