"""Checks of rollout engines, on tiny weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from surogate_core.plugin import MachineError, bundles
from surogate_core.service.inference import Weights
from surogate_testing import tiny
from surogate_testing.check import NotApplicable, ensure

TOLERANCE = 1e-4
"""Largest difference of log-probabilities in fp32."""
LENGTHS = (3, 16, 17, 1)
NEW = 6


def _weights() -> Weights:
    assembly = tiny.assembly(lora=tiny.lora())
    return Weights.load(assembly, tiny.random_source())


def _requests(sampling: bundles.Sampling, **changes: object) -> list[bundles.Request]:
    return [
        bundles.Request(prompt=tuple(ids), max_new_tokens=NEW, number=number, sampling=sampling, **changes)  # type: ignore[arg-type]
        for number, ids in enumerate(tiny.documents(LENGTHS))
    ]


def _opened(spec: bundles.RolloutEngineSpec, slots: int = len(LENGTHS)) -> bundles.RolloutEngine:
    """An engine with default options; raises `NotApplicable` if it needs a server that is not there."""
    try:
        return spec.open(_weights(), bundles.RolloutSettings(slots=slots, context=max(LENGTHS) + NEW))
    except MachineError as error:
        raise NotApplicable(str(error)) from None


def _same(found: Sequence[bundles.Completion], other: Sequence[bundles.Completion]) -> bool:
    return [c.ids for c in found] == [c.ids for c in other]


def continues_with_the_most_probable_token(spec: bundles.RolloutEngineSpec) -> None:
    """At temperature 0 each token is the most probable one, and its log-probability is that of the training forward."""
    requests = _requests(bundles.Sampling(temperature=0))
    trained = tiny.engine(lora=tiny.lora())
    for request, completion in zip(requests, _opened(spec).generate(requests), strict=True):
        ensure(len(completion.ids) == len(completion.logprobs) == NEW, f"{len(completion.ids)} tokens, not {NEW}")
        ensure(completion.reason == "length", f"the reason is {completion.reason!r}, not 'length'")
        whole = [*request.prompt, *completion.ids]
        logprobs = torch.log_softmax(trained.logits(tiny.batch([whole]))[: len(whole)].float(), dim=-1)
        before = logprobs[len(request.prompt) - 1 : -1]
        ensure(before.argmax(-1).tolist() == list(completion.ids), "a token is not the most probable one")
        chosen = before.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        error = (chosen - torch.tensor(completion.logprobs)).abs().max().item()
        ensure(error <= TOLERANCE, f"log-probabilities differ by {error:.1e}")


def samples_by_its_key(spec: bundles.RolloutEngineSpec) -> None:
    """Equal requests give equal tokens in any company and any slot; another seed or sample gives others."""
    requests = _requests(bundles.Sampling(temperature=2.0))
    together = _opened(spec).generate(requests)
    ensure(_same(together, _opened(spec, slots=1).generate(requests)), "one slot gives other tokens")
    alone = [_opened(spec).generate([request])[0] for request in requests]
    ensure(_same(together, alone), "a request alone gives other tokens")
    ensure(
        not _same(together, _opened(spec).generate(_requests(bundles.Sampling(temperature=2.0), sample=1))),
        "another sample is equal",
    )
    ensure(
        not _same(together, _opened(spec).generate(_requests(bundles.Sampling(temperature=2.0, seed=1)))),
        "another seed is equal",
    )


def stops(spec: bundles.RolloutEngineSpec) -> None:
    """A stop token ends a completion and is part of it; so does the caller."""
    first = _opened(spec).generate(_requests(bundles.Sampling(temperature=0)))[0].ids
    request = _requests(bundles.Sampling(temperature=0), stop_ids=frozenset({first[0]}))[0]
    (stopped,) = _opened(spec).generate([request])
    ensure(stopped.ids == first[:1] and stopped.reason == "stop", f"{stopped.ids}, {stopped.reason!r}")
    seen: list[tuple[int, int]] = []

    def on_token(index: int, token: int) -> bool:
        seen.append((index, token))
        return len(seen) == 3

    (ended,) = _opened(spec).generate(_requests(bundles.Sampling(temperature=0))[:1], on_token=on_token)
    ensure(ended.ids == first[:3] and ended.reason == "stop", f"ended by the caller: {ended.ids}, {ended.reason!r}")
    ensure(seen == [(0, token) for token in first[:3]], f"the caller saw {seen}")


def serves(spec: bundles.RolloutEngineSpec) -> None:
    """Requests that arrive while others run get the tokens that they get alone."""
    requests = _requests(bundles.Sampling(temperature=2.0))
    arrivals = [requests[:1], requests[1:3], requests[3:]]
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}

    def on_token(index: int, token: int, logprob: float) -> bool:
        tokens.setdefault(index, []).append(token)
        logprobs.setdefault(index, []).append(logprob)
        return False

    def arriving() -> Sequence[bundles.Request]:
        """The next ones when some of the last ones have begun."""
        come = len(requests) - sum(map(len, arrivals))
        return arrivals.pop(0) if arrivals and (not come or come - 1 in tokens) else ()

    _opened(spec, slots=2).serve(arriving, on_token)
    for index, alone in enumerate(_opened(spec).generate(requests)):
        ensure(tuple(tokens.get(index, ())) == alone.ids, f"request {index} has other tokens than alone")
        error = max(abs(a - b) for a, b in zip(logprobs[index], alone.logprobs, strict=True))
        ensure(error <= TOLERANCE, f"log-probabilities differ by {error:.1e}")


class Stepwise:
    """A grammar: which tokens may be next depends on the last one, and the text ends after some tokens."""

    def __init__(self, length: int, stop: int, *, step: int = 3, size: int = tiny.VOCABULARY):
        self.length, self.stop, self.step, self.size = length, stop, step, size
        self.failure: str | None = None

    def begin(self) -> _Steps:
        """See `Grammar`."""
        return _Steps(self)

    def holds(self, ids: Sequence[int]) -> bool:
        """Whether a completion is held to it, or is cut."""
        ends = ids[self.length :]
        pairs = pairwise(ids[: self.length])
        return all((b - a) % self.step == 1 for a, b in pairs) and list(ends) in ([], [self.stop])


class _Steps:
    def __init__(self, grammar: Stepwise):
        self._grammar, self._taken = grammar, list[int]()

    def mask(self) -> bytes:
        grammar, tokens = self._grammar, np.arange(self._grammar.size)
        if len(self._taken) >= grammar.length:
            allowed = tokens == grammar.stop
        else:
            allowed = (tokens - self._taken[-1]) % grammar.step == 1 if self._taken else tokens >= 0
            allowed = allowed & (tokens != grammar.stop)
        return np.packbits(allowed, bitorder="little").tobytes()

    def take(self, token: int) -> None:
        self._taken.append(token)


def holds_completions_to_grammars(spec: bundles.RolloutEngineSpec) -> None:
    """Every token of a request with a grammar is one that it allows; the log-probabilities are those of all tokens, and
    requests beside it have the tokens that they have alone.
    """
    if not spec.constrains:
        raise NotApplicable(f"{spec.name} takes no grammar")
    for sampling in (
        bundles.Sampling(temperature=0),
        bundles.Sampling(temperature=2.0, top_k=20, repetition_penalty=1.2),
    ):
        free = _requests(sampling)
        stop = tiny.VOCABULARY - 1
        grammars = [None, Stepwise(NEW - 2, stop), None, Stepwise(NEW + 1, stop)]
        asked = [
            replace(one, grammar=grammar, stop_ids=frozenset({stop}) if grammar else one.stop_ids)
            for one, grammar in zip(free, grammars, strict=True)
        ]
        found = _opened(spec, slots=3).generate(asked)
        ensure(_same([found[0], found[2]], [_opened(spec).generate([free[n]])[0] for n in (0, 2)]), "neighbours differ")
        for request, completion in zip(asked, found, strict=True):
            if isinstance(grammar := request.grammar, Stepwise):
                ensure(grammar.holds(completion.ids), f"{completion.ids} is not what the grammar allows")
                ends = len(completion.ids) == grammar.length + 1
                ensure(completion.reason == ("stop" if ends else "length"), f"the reason is {completion.reason!r}")
            whole = [*request.prompt, *completion.ids]
            values = _opened(spec).logprobs([whole])[0][-len(completion.ids) :]
            error = max(abs(a - b) for a, b in zip(values, completion.logprobs, strict=True))
            ensure(error <= TOLERANCE, f"log-probabilities differ by {error:.1e}")


def scores(spec: bundles.RolloutEngineSpec) -> None:
    """`logprobs` are those of the training forward, for documents of any length."""
    documents = tiny.documents(LENGTHS)
    trained = tiny.engine(lora=tiny.lora())
    found = _opened(spec, slots=2).logprobs(documents)
    for document, values in zip(documents, found, strict=True):
        logprobs = torch.log_softmax(trained.logits(tiny.batch([document])).float(), dim=-1)
        expected = [logprobs[i, token].item() for i, token in enumerate(document[1:])]
        ensure(len(values) == len(expected), f"{len(values)} log-probabilities of {len(document)} tokens")
        error = max((abs(a - b) for a, b in zip(values, expected, strict=True)), default=0.0)
        ensure(error <= TOLERANCE, f"log-probabilities differ by {error:.1e}")


CHECKS = (
    continues_with_the_most_probable_token,
    samples_by_its_key,
    stops,
    serves,
    holds_completions_to_grammars,
    scores,
)
