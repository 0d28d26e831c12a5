"""Checks of rollout engines, on tiny weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from surogate_core.bundles import Completion, Request, RolloutEngine, RolloutEngineSpec, RolloutSettings, Sampling
from surogate_core.errors import MachineError
from surogate_core.generate.weights import Weights
from surogate_core.testing import tiny
from surogate_core.testing.check import NotApplicable, ensure

TOLERANCE = 1e-4
"""Largest difference of log-probabilities in fp32."""
LENGTHS = (3, 16, 17, 1)
NEW = 6


def _weights() -> Weights:
    assembly = tiny.assembly(lora=tiny.lora())
    return Weights.load(assembly, tiny.random_source())


def _requests(sampling: Sampling, **changes: object) -> list[Request]:
    return [
        Request(prompt=tuple(ids), max_new_tokens=NEW, number=number, sampling=sampling, **changes)  # type: ignore[arg-type]
        for number, ids in enumerate(tiny.documents(LENGTHS))
    ]


def _opened(spec: RolloutEngineSpec, slots: int = len(LENGTHS)) -> RolloutEngine:
    """An engine with default options; raises `NotApplicable` if it needs a server that is not there."""
    try:
        return spec.open(_weights(), RolloutSettings(slots=slots, context=max(LENGTHS) + NEW))
    except MachineError as error:
        raise NotApplicable(str(error)) from None


def _same(found: Sequence[Completion], other: Sequence[Completion]) -> bool:
    return [c.ids for c in found] == [c.ids for c in other]


def continues_with_the_most_probable_token(spec: RolloutEngineSpec) -> None:
    """At temperature 0 each token is the most probable one, and its log-probability is that of the training forward."""
    requests = _requests(Sampling(temperature=0))
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


def samples_by_its_key(spec: RolloutEngineSpec) -> None:
    """Equal requests give equal tokens in any company and any slot; another seed or sample gives others."""
    requests = _requests(Sampling(temperature=2.0))
    together = _opened(spec).generate(requests)
    ensure(_same(together, _opened(spec, slots=1).generate(requests)), "one slot gives other tokens")
    alone = [_opened(spec).generate([request])[0] for request in requests]
    ensure(_same(together, alone), "a request alone gives other tokens")
    ensure(
        not _same(together, _opened(spec).generate(_requests(Sampling(temperature=2.0), sample=1))),
        "another sample is equal",
    )
    ensure(
        not _same(together, _opened(spec).generate(_requests(Sampling(temperature=2.0, seed=1)))),
        "another seed is equal",
    )


def stops(spec: RolloutEngineSpec) -> None:
    """A stop token ends a completion and is part of it; so does the caller."""
    first = _opened(spec).generate(_requests(Sampling(temperature=0)))[0].ids
    request = _requests(Sampling(temperature=0), stop_ids=frozenset({first[0]}))[0]
    (stopped,) = _opened(spec).generate([request])
    ensure(stopped.ids == first[:1] and stopped.reason == "stop", f"{stopped.ids}, {stopped.reason!r}")
    seen: list[tuple[int, int]] = []

    def on_token(index: int, token: int) -> bool:
        seen.append((index, token))
        return len(seen) == 3

    (ended,) = _opened(spec).generate(_requests(Sampling(temperature=0))[:1], on_token=on_token)
    ensure(ended.ids == first[:3] and ended.reason == "stop", f"ended by the caller: {ended.ids}, {ended.reason!r}")
    ensure(seen == [(0, token) for token in first[:3]], f"the caller saw {seen}")


def serves(spec: RolloutEngineSpec) -> None:
    """Requests that arrive while others run get the tokens that they get alone."""
    requests = _requests(Sampling(temperature=2.0))
    arrivals = [requests[:1], requests[1:3], requests[3:]]
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}

    def on_token(index: int, token: int, logprob: float) -> bool:
        tokens.setdefault(index, []).append(token)
        logprobs.setdefault(index, []).append(logprob)
        return False

    def arriving() -> Sequence[Request]:
        """The next ones when some of the last ones have begun."""
        come = len(requests) - sum(map(len, arrivals))
        return arrivals.pop(0) if arrivals and (not come or come - 1 in tokens) else ()

    _opened(spec, slots=2).serve(arriving, on_token)
    for index, alone in enumerate(_opened(spec).generate(requests)):
        ensure(tuple(tokens.get(index, ())) == alone.ids, f"request {index} has other tokens than alone")
        error = max(abs(a - b) for a, b in zip(logprobs[index], alone.logprobs, strict=True))
        ensure(error <= TOLERANCE, f"log-probabilities differ by {error:.1e}")


def scores(spec: RolloutEngineSpec) -> None:
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


CHECKS = (continues_with_the_most_probable_token, samples_by_its_key, stops, serves, scores)
