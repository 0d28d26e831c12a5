"""The core's rollout engine: prompts are prefilled in segments, and all slots decode together.

On a CPU the result of a row depends on the number of rows that it is multiplied with, but not on its place among them.
Every product therefore has one of two fixed numbers of rows, and a token's number depends on its kind only: `SEGMENT`
rows times `SEGMENTS` for a token of a prompt, `ROWS` for a chosen one. So equal requests give equal bits, whatever else
is in the batch and however many slots there are.

Shape suffixes: N rows, D features, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from surogate_core.bundles import Arriving, Completion, OnChosen, OnToken, Reason, Request, RolloutSettings
from surogate_core.dsl.sides import REAL
from surogate_core.errors import UserError
from surogate_core.generate.cache import Cache, CachedAttention, Places, shapes_of, with_own
from surogate_core.generate.sampling import Rows, choose, key_of
from surogate_core.generate.weights import Weights
from surogate_core.kernels.registry import using

ROWS = 16
"""Rows of a product while decoding on a CPU."""
SEGMENT = 16
"""Tokens of a segment of a prompt. Segments are counted from the beginning of the prompt."""
SEGMENTS = 4
"""Segments that are prefilled at a time on a CPU."""
GPU_SEGMENTS = 128
"""The same on a GPU, which needs many rows to be busy."""


@dataclass(slots=True)
class _Sequence:
    """A request in its slot."""

    index: int
    request: Request
    slot: int
    key: tuple[int, int]
    hidden_D: Tensor = field(default_factory=lambda: torch.empty(0))
    """The last layer's output for its last token."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens so far, the prompt included."""
        return len(self.request.prompt) + len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    """A prompt whose keys and values are to be written into a slot, from a segment on."""

    slot: int
    ids: tuple[int, ...]
    start: int = 0

    def segments(self) -> range:
        """The first position of each segment."""
        return range(self.start, len(self.ids), SEGMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Rows that go through the layers together."""

    ids_N: Tensor
    places: Places
    tables: Sequence[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The fixed numbers of rows."""

    rows: int
    """Sequences that are decoded at a time."""
    segments: int
    """Segments that are prefilled at a time."""

    @classmethod
    def of(cls, device: torch.device, slots: int) -> Sizes:
        """Those of a device: a GPU decodes all slots at a time."""
        if device.type == "cpu":
            return cls(rows=ROWS, segments=SEGMENTS)
        return cls(rows=slots, segments=GPU_SEGMENTS)


class NativeEngine:
    """Generation with the weights of a run where they are."""

    def __init__(self, weights: Weights, settings: RolloutSettings, *, sizes: Sizes | None = None):
        self.weights, self.slots, self.frozen = weights, settings.slots, settings.frozen
        self.context = -(-settings.context // SEGMENT) * SEGMENT
        parameters = weights.parameters
        self.sizes = sizes or Sizes.of(parameters.device, self.slots)
        self.shapes = shapes_of(weights)
        self.cache = Cache(
            self.shapes, slots=self.slots, context=self.context, dtype=parameters.dtype, device=parameters.device
        )
        self._attention = CachedAttention(self.cache)
        own: dict[str, Callable[..., Tensor]] = {"attention": self._attention}
        if parameters.device.type == "cpu":
            own["grouped_product"] = tiled_product
        self._table = with_own(weights.programs.kernels, **own)
        self._prompts: list[tuple[int, ...]] = [()] * self.slots
        """For each slot the prompt whose keys and values it begins with."""
        self._last = [torch.empty(0)] * self.slots
        """For each slot the last layer's output for the last token of that prompt."""
        self._borders = torch.zeros(1, dtype=torch.int32, device=parameters.device)

    # --------------------------------------------------------------------------- public

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], *, on_token: OnToken | None = None) -> list[Completion]:
        """A completion of each request, in their order."""
        done: dict[int, Completion] = {}
        take = on_token or (lambda index, token: False)
        with self._keeping():
            self._generate(requests, tuple, lambda index, token, logprob: take(index, token), done.__setitem__)
        return [done[index] for index in range(len(requests))]

    @torch.no_grad()
    def serve(self, arriving: Arriving, on_token: OnChosen) -> None:
        """Completes requests that arrive while others run, until none runs and none arrives."""
        with self._keeping():
            self._generate((), arriving, on_token, lambda index, completion: None)

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Slots keep the prompts that they begin with, unless weights may have changed or a call fails."""
        if not self.frozen:
            self._forget()
        try:
            yield
        except BaseException:
            self._forget()  # what a slot begins with may not be written
            raise

    def _generate(
        self,
        requests: Sequence[Request],
        arriving: Arriving,
        on_token: OnChosen,
        ended: Callable[[int, Completion], None],
    ) -> None:
        waiting: deque[tuple[int, Request]] = deque()
        numbers = count()
        free = list(range(self.slots))[::-1]
        running: list[_Sequence] = []
        while True:
            for request in (*requests, *arriving()):
                self._check(request)
                waiting.append((next(numbers), request))
            requests = ()
            if not (waiting or running):
                return
            running += self._begin(waiting, free)
            going = []
            for sequence in self._choose(running):
                reason = self._ended(sequence, on_token)
                if reason is None:
                    going.append(sequence)
                    continue
                free.append(sequence.slot)
                found = Completion(ids=tuple(sequence.ids), logprobs=tuple(sequence.logprobs), reason=reason)
                ended(sequence.index, found)
            self._decode(going)
            running = going

    @torch.no_grad()
    def logprobs(self, documents: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probability of every token of each document but its first."""
        found: list[list[float]] = []
        for first in range(0, len(documents), self.slots):
            some = [tuple(document) for document in documents[first : first + self.slots]]
            self._forget()
            hidden = self._prefill([_Fill(slot=slot, ids=ids) for slot, ids in enumerate(some)])
            found += [self._following(x_ND, ids) for x_ND, ids in zip(hidden, some, strict=True)]
        return found

    def _following(self, x_ND: Tensor, ids: Sequence[int]) -> list[float]:
        """The log-probability of each token but the first."""
        values: list[float] = []
        for first in range(0, len(ids) - 1, self.sizes.rows):
            logits_NV = self._logits(x_ND[first : first + self.sizes.rows])
            following = torch.tensor(ids[first + 1 : first + 1 + self.sizes.rows], device=x_ND.device)
            logprobs_NV = torch.log_softmax(logits_NV.float(), dim=-1)[: len(following)]
            values += logprobs_NV.gather(1, following[:, None])[:, 0].tolist()
        return values

    # ------------------------------------------------------------------------ scheduling

    def _check(self, request: Request) -> None:
        assert request.prompt, "a prompt has at least one token"
        assert request.max_new_tokens > 0
        assert len(request.prompt) + request.max_new_tokens <= self.context, "longer than a slot"

    def _forget(self) -> None:
        """Prompts are prefilled anew."""
        self._prompts = [()] * self.slots

    def _begin(self, waiting: deque[tuple[int, Request]], free: list[int]) -> list[_Sequence]:
        """Put waiting requests into free slots. Equal prompts that follow each other share one prefill."""
        begun: list[_Sequence] = []
        fills: dict[tuple[int, ...], _Fill] = {}
        followers: list[tuple[int, int]] = []
        while waiting and free:
            index, request = waiting.popleft()
            prompt = request.prompt
            slot = next((s for s in free if self._prompts[s] == prompt), free[-1])
            free.remove(slot)
            if prompt in fills:
                followers.append((slot, fills[prompt].slot))
            elif self._prompts[slot] != prompt:
                source, shared = self._longest_shared(prompt, fills)
                if source != slot:
                    self.cache.copy_prefix(source, slot, shared)
                if shared < len(prompt):
                    fills[prompt] = _Fill(slot=slot, ids=prompt, start=shared)
                else:
                    self._last[slot] = self._last[source]
            self._prompts[slot] = prompt
            begun.append(_Sequence(index=index, request=request, slot=slot, key=key_of(request)))
        for fill, x_ND in zip(fills.values(), self._prefill(list(fills.values())), strict=True):
            self._last[fill.slot] = x_ND[len(fill.ids) - 1 - fill.start].clone()
        for slot, leader in followers:
            self.cache.copy_prefix(leader, slot, len(self._prompts[slot]))
            self._last[slot] = self._last[leader]
        for sequence in begun:
            sequence.hidden_D = self._last[sequence.slot]
        return begun

    def _longest_shared(self, prompt: tuple[int, ...], fills: Mapping[tuple[int, ...], _Fill]) -> tuple[int, int]:
        """(slot, number of first tokens that a prompt in it shares): all of them, or whole segments."""
        best, most = 0, 0
        for slot, other in enumerate(self._prompts):
            if other in fills:
                continue  # not there yet
            if other == prompt:
                return slot, len(prompt)
            pairs = zip(prompt[:-1], other, strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt) - 1, len(other)))
            if common // SEGMENT * SEGMENT > most:
                best, most = slot, common // SEGMENT * SEGMENT
        return best, most

    def _choose(self, running: Sequence[_Sequence]) -> Sequence[_Sequence]:
        """Append the next token of each."""
        device, vocabulary = self.weights.device, self.weights.plan.assembly.model.vocab_size
        for first in range(0, len(running), self.sizes.rows):
            some = running[first : first + self.sizes.rows]
            padded = [*some, *[some[0]] * (self.sizes.rows - len(some))]
            samplings = [s.request.sampling for s in padded]
            seen_NV = None
            if any(s.repetition_penalty != 1 for s in samplings):
                seen_NV = torch.zeros(self.sizes.rows, vocabulary, dtype=torch.bool, device=device)
                for row, sequence in enumerate(padded):
                    seen_NV[row, [*sequence.request.prompt, *sequence.ids]] = True
            rows = Rows.of(samplings, [s.key for s in padded], [len(s.ids) for s in padded], device)
            logits_NV = self._logits(torch.stack([s.hidden_D for s in padded]))
            tokens_N, logprobs_N = choose(logits_NV, rows, seen_NV)
            for sequence, token, logprob in zip(some, tokens_N.tolist(), logprobs_N.tolist(), strict=False):
                if math.isnan(logprob):
                    weight = self.weights.not_finite()
                    raise UserError(
                        f"the model's logits are not numbers: {weight or 'no weight'} has NaN or infinity. "
                        f"Fix: use weights of a run that did not diverge, or another model_dtype"
                    )
                sequence.ids.append(token)
                sequence.logprobs.append(logprob)
        return running

    def _ended(self, sequence: _Sequence, on_token: OnChosen) -> Reason | None:
        token, request = sequence.ids[-1], sequence.request
        stopped = on_token(sequence.index, token, sequence.logprobs[-1])
        if stopped or token in request.stop_ids:
            return "stop"
        return "length" if len(sequence.ids) >= request.max_new_tokens else None

    # --------------------------------------------------------------------------- passes

    def _prefill(self, fills: Sequence[_Fill]) -> list[Tensor]:
        """For each the last layer's output for its tokens from its start on, and behind them for padding."""
        segments = [(number, start) for number, fill in enumerate(fills) for start in fill.segments()]
        passes = []
        for first in range(0, len(segments), self.sizes.segments):
            some = segments[first : first + self.sizes.segments]
            ids, lasts, places = [], [], []
            for number, start in some:
                fill = fills[number]
                tokens = fill.ids[start : start + SEGMENT]
                ids += [*tokens, *[0] * (SEGMENT - len(tokens))]
                lasts += [len(fill.ids) - 1] * SEGMENT
                places.append((fill.slot, start))
            rest = self.sizes.segments - len(some)
            ids += [0] * (rest * SEGMENT)
            lasts += [0] * (rest * SEGMENT)
            places += [(self.slots, 0)] * rest
            passes.append(self._pass(ids, lasts, places, width=SEGMENT))
        outputs = torch.cat(
            [x_ND.view(self.sizes.segments, SEGMENT, -1) for x_ND in self._run(passes)] or [torch.empty(0)]
        )
        found: list[list[Tensor]] = [[] for _ in fills]
        for (number, _), x_ND in zip(segments, outputs, strict=False):
            found[number].append(x_ND)
        return [torch.cat(parts) for parts in found]

    def _decode(self, running: Sequence[_Sequence]) -> None:
        """Run the layers for the last token of each."""
        passes = []
        for first in range(0, len(running), self.sizes.rows):
            some = running[first : first + self.sizes.rows]
            rest = self.sizes.rows - len(some)
            ids = [s.ids[-1] for s in some] + [0] * rest
            lasts = [s.length - 1 for s in some] + [0] * rest
            places = [(s.slot, s.length - 1) for s in some] + [(self.slots, 0)] * rest
            passes.append(self._pass(ids, lasts, places, width=1))
        for number, x_ND in enumerate(self._run(passes)):
            for sequence, x_D in zip(running[number * self.sizes.rows :], x_ND, strict=False):
                sequence.hidden_D = x_D

    def _pass(
        self, ids: Sequence[int], lasts: Sequence[int], places: Sequence[tuple[int, int]], *, width: int
    ) -> _Pass:
        device = self.weights.device
        slots, starts = (torch.tensor(column, device=device) for column in zip(*places, strict=True))
        where = Places(slots_G=slots, starts_G=starts, width=width)
        return _Pass(
            ids_N=torch.tensor(ids, device=device),
            places=where,
            tables=self._tables(where.positions(), torch.tensor(lasts, device=device)),
        )

    def _tables(self, positions_N: Tensor, lasts_N: Tensor) -> list[Tensor]:
        """What every block reads. A row's angles may depend on the length of its document, which is positions up to
        `lasts`; so each row is asked for as a document of its first, this and its last position.
        """
        three = torch.stack([torch.zeros_like(positions_N), positions_N, lasts_N], dim=1).flatten().int()
        tables = self.weights.plan.assembly.model.tables(three, self.weights.parameters.dtype)
        real = [torch.ones_like(positions_N, dtype=torch.bool)] if REAL in self.weights.plan.tables else []
        return [*(table[1::3] for table in tables.values()), self._borders, *real]

    def _run(self, passes: Sequence[_Pass]) -> list[Tensor]:
        """The last layer's output of each. Each layer runs for all of them before the next one is fetched."""
        if not passes:
            return []
        xs = [self.weights.embedded(p.ids_N) for p in passes]
        with using(self._table):
            for number, layer in enumerate(self.weights.layers()):
                for index, one in enumerate(passes):
                    self._attention.begin(number, one.places)
                    xs[index] = layer(xs[index], one.tables)
        return xs

    def _logits(self, x_ND: Tensor) -> Tensor:
        """[N, V] of as many rows as are decoded at a time, or fewer."""
        missing = self.sizes.rows - len(x_ND)
        padded = torch.nn.functional.pad(x_ND, (0, 0, 0, missing))
        with using(self._table):
            return self.weights.logits(padded)[: len(x_ND)]


def tiled_product(x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The op `grouped_product` on a CPU with `ROWS` rows in every product: how many rows an expert has depends on the
    neighbours.
    """
    y_RO = x_RI.new_empty(x_RI.shape[0], weights_EOI.shape[1])
    begin = 0
    for weight_OI, end in zip(weights_EOI, ends_E.tolist(), strict=True):
        for first in range(begin, end, ROWS):
            rows = x_RI[first : min(first + ROWS, end)]
            padded = torch.nn.functional.pad(rows, (0, 0, 0, ROWS - len(rows)))
            y_RO[first : first + len(rows)] = (padded @ weight_OI.t())[: len(rows)]
        begin = end
    return y_RO
