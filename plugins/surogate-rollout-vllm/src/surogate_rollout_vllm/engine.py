"""A rollout engine whose completions are made by a vLLM server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from surogate_core.plugin import MachineError, UserError, bundles
from surogate_rollout_vllm.adapters import ServerAdapter
from surogate_rollout_vllm.client import Client
from surogate_rollout_vllm.mode import check_mode, mode_for
from surogate_rollout_vllm.options import VllmOptions
from surogate_rollout_vllm.wire import completed, models_of, scored

T = TypeVar("T")
POLL = 0.02
"""Seconds between two looks for arriving requests."""


class VllmEngine:
    """Completions by a server that has the base model and receives the adapter whenever it has changed."""

    def __init__(self, weights: bundles.ModelWeights, settings: bundles.RolloutSettings, options: VllmOptions):
        """Asks the server for its models. Raises `MachineError` if it does not answer or has another context."""
        key = os.environ.get(options.key_variable)
        self.client = Client(options.url, key=key, timeout=options.timeout, retries=options.retries)
        self.options = options
        answer = self.client.get("/v1/models")
        base = _base(self.client, answer, options.model)
        _check_context(answer, base, settings.context, self.client.url)
        self.adapters = ServerAdapter(weights, self.client, options, base)
        self._frozen = settings.frozen
        self._modes: set[str] = set()
        """Modes of log-probabilities that the server was found to have."""

    # --------------------------------------------------------------------------- public

    def generate(
        self, requests: Sequence[bundles.Request], *, on_token: bundles.OnToken | None = None
    ) -> list[bundles.Completion]:
        """A completion of each request, in their order. Tokens are passed on when their completion is there."""
        if not requests:
            return []
        modes = {mode: request for request in requests if (mode := mode_for(request.sampling)) is not None}
        self._update([request.prompt for request in requests])
        for mode in sorted(modes.keys() - self._modes):
            check_mode(self.client, self.adapters.name, modes[mode], mode, self.options.probe_tolerance)
            self._modes.add(mode)
        found: dict[int, bundles.Completion] = {}
        take = on_token or (lambda index, token: False)
        with self._requests() as pool:
            open_ = {pool.submit(self._completed, request): index for index, request in enumerate(requests)}
            for index, completion in _ended(open_):
                found[index] = _cut(completion, lambda token, _, index=index: take(index, token))  # type: ignore[misc]
        return [found[index] for index in range(len(requests))]

    def serve(self, arriving: bundles.Arriving, on_token: bundles.OnChosen) -> None:
        """Completes requests that arrive while others run, until none runs and none arrives."""
        open_: dict[Future[bundles.Completion], int] = {}
        number = 0
        with self._requests() as pool:
            while True:
                come = arriving()
                if come:
                    self._update([request.prompt for request in come])
                for request in come:
                    open_[pool.submit(self._completed, request)] = number
                    number += 1
                if not open_:
                    return
                done, _ = wait(open_, timeout=POLL, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda f: open_[f]):
                    index = open_.pop(future)
                    _cut(future.result(), lambda token, logprob, index=index: on_token(index, token, logprob))  # type: ignore[misc]

    def forget(self) -> None:
        """The weights may have changed: the adapter is compared before the next completion."""
        self.adapters.stale = True

    def copy_weights(self, documents: Sequence[Sequence[int]]) -> None:
        """Load the adapter as it is now; completions until `forget` have these weights."""
        self.adapters.stale = True
        self.adapters.update(documents)

    def close(self) -> None:
        """Unload the adapter."""
        self.adapters.close()

    def logprobs(self, documents: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probability of every token of each document but its first."""
        self._update(documents)
        with self._requests() as pool:
            open_ = {
                pool.submit(scored, self.client, self.adapters.name, document): index
                for index, document in enumerate(documents)
                if len(document) > 1
            }
            found = dict(_ended(open_))
        return [found.get(index, []) for index in range(len(documents))]

    # ------------------------------------------------------------------------- requests

    def _update(self, prompts: Sequence[Sequence[int]]) -> None:
        self.adapters.stale |= not self._frozen
        self.adapters.update(prompts)

    def _completed(self, request: bundles.Request) -> bundles.Completion:
        return completed(self.client, request, self.adapters.name)

    @contextmanager
    def _requests(self) -> Iterator[ThreadPoolExecutor]:
        """Threads for requests beside each other; those that are open are broken off if one fails."""
        pool = ThreadPoolExecutor(self.options.requests_at_once, thread_name_prefix="vllm")
        try:
            yield pool
        except BaseException:
            self.client.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            self.client.resume()


def _ended(open_: dict[Future[T], int]) -> Iterable[tuple[int, T]]:
    """(number, result) of each future as it ends."""
    left = set(open_)
    while left:
        done, left = wait(left, return_when=FIRST_COMPLETED)
        for future in sorted(done, key=lambda f: open_[f]):
            yield open_[future], future.result()


def _cut(completion: bundles.Completion, ends: Callable[[int, float], bool]) -> bundles.Completion:
    """The completion up to the token at which the caller ends it."""
    for position, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True), start=1):
        if ends(token, logprob):
            ids, logprobs = completion.ids[:position], completion.logprobs[:position]
            return replace(completion, ids=ids, logprobs=logprobs, reason="stop")
    return completion


def _base(client: Client, answer: object, wanted: str | None) -> str:
    models = models_of(answer)
    names = [name for name, adapter in models if not adapter]
    if wanted is not None:
        if wanted in [name for name, _ in models]:
            return wanted
        shown = ", ".join(name for name, _ in models) or "no model"
        raise UserError(f"rollout.model: {client.url} does not serve {wanted}; it serves {shown}.")
    if len(names) != 1:
        shown = ", ".join(names) or "no model"
        raise MachineError(f"rollout vllm: {client.url} serves {shown}. Fix: rollout.model=NAME")
    return names[0]


def _check_context(answer: object, base: str, context: int, url: str) -> None:
    data = answer.get("data") if isinstance(answer, dict) else None
    for one in data if isinstance(data, list) else []:
        longest = one.get("max_model_len") if isinstance(one, dict) and one.get("id") == base else None
        if isinstance(longest, int) and longest < context:
            raise MachineError(
                f"rollout vllm: {url} serves {longest:,} tokens, and the longest sequence has {context:,}. "
                f"Fix: serve with --max-model-len {context}, or fewer tokens"
            )
