"""The core's rollout engine: requests wait for slots, prompts are prefilled, and all slots decode together.

`passes` runs the layers on a CPU, where every row has the bits that it has alone; `decoding` runs them on a GPU, where
a block of steps runs without waiting for the host.

Shape suffixes: N rows, D features, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from surogate_core.bundles import Arriving, Completion, OnChosen, OnToken, Reason, Request, RolloutSettings
from surogate_core.bundles.handed import ModelWeights, whole
from surogate_core.errors import UserError
from surogate_core.generate.cache import Cache, mixers_of
from surogate_core.generate.decoding import SteppedRunner
from surogate_core.generate.drafts import Siblings
from surogate_core.generate.passes import FixedRunner
from surogate_core.generate.sampling import key_of
from surogate_core.generate.sequences import SEGMENT, Chosen, Fill, Runner, Running
from surogate_core.generate.weights import Weights

LOGIT_ROWS = 256
"""Tokens of a document whose logits exist at one time."""


class NativeEngine:
    """Generation with the weights of a run where they are."""

    def __init__(
        self, weights: ModelWeights, settings: RolloutSettings, *, stepped: bool | None = None, drafts: bool = True
    ):
        """`stepped`: whether layers run as on a GPU; by default on a GPU only. `drafts`: whether steps may check some
        (`generate.drafts`), which changes no bit.
        """
        own = whole(Weights, weights)
        self.weights, self.slots, self.frozen = own, settings.slots, settings.frozen
        self.context = -(-settings.context // SEGMENT) * SEGMENT
        parameters = own.parameters
        self.cache = Cache(
            mixers_of(own), slots=self.slots, context=self.context, dtype=parameters.dtype, device=parameters.device
        )
        on_cpu = parameters.device.type == "cpu" if stepped is None else not stepped
        self._runner: Runner = (FixedRunner if on_cpu else SteppedRunner)(own, self.cache, drafts=drafts)
        self._prompts: list[tuple[int, ...]] = [()] * self.slots
        """For each slot the prompt whose keys and values it begins with."""
        self._used, self._uses = [0] * self.slots, count(1)
        """For each slot when it was given away last."""
        model = own.plan.assembly.model
        self._switches, self._angles = model.switches, model.angles
        self._last = [torch.empty(0)] * self.slots
        """For each slot the last layer's output for the last token of that prompt."""
        self._siblings: WeakValueDictionary[tuple[int, ...], Siblings] = WeakValueDictionary()
        """Prompt → what its texts share, while one of them runs."""

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
            self.forget()
        try:
            yield
        except BaseException:
            self.forget()  # what a slot begins with may not be written
            raise

    def _generate(
        self,
        requests: Sequence[Request],
        arriving: Arriving,
        on_token: OnChosen,
        ended: Callable[[int, Completion], None],
    ) -> None:
        self._siblings.clear()
        waiting: deque[tuple[int, Request]] = deque()
        numbers = count()
        free = list(range(self.slots))[::-1]
        running: list[Running] = []
        while True:
            for request in (*requests, *arriving()):
                self._check(request)
                waiting.append((next(numbers), request))
            requests = ()
            if not (waiting or running):
                return
            if not running or len(free) >= min(self._runner.gather, len(waiting)):
                running += self._begin(waiting, free)
            going = []
            advanced = self._runner.advance(running, queued=bool(waiting))
            for sequence, chosen in zip(running, advanced, strict=True):
                reason = self._take(sequence, chosen, on_token)
                if reason is None:
                    going.append(sequence)
                    continue
                free.append(sequence.slot)
                sequence.siblings.ended.append(sequence.ids)
                found = Completion(ids=tuple(sequence.ids), logprobs=tuple(sequence.logprobs), reason=reason)
                ended(sequence.index, found)
            running = self._grown(going)

    def forget(self) -> None:
        """Prompts are prefilled anew, since weights have changed. What follows does not depend on earlier calls."""
        self._prompts = [()] * self.slots
        self._used, self._uses = [0] * self.slots, count(1)

    @torch.no_grad()
    def logprobs(self, documents: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probability of every token of each document but its first."""
        found: list[list[float]] = []
        for first in range(0, len(documents), self.slots):
            some = [tuple(document) for document in documents[first : first + self.slots]]
            self.forget()
            hidden = self._prefill([Fill(slot=slot, ids=ids) for slot, ids in enumerate(some)])
            found += [self._following(x_ND, ids) for x_ND, ids in zip(hidden, some, strict=True)]
        return found

    def _following(self, x_ND: Tensor, ids: Sequence[int]) -> list[float]:
        """The log-probability of each token but the first."""
        values: list[float] = []
        following_N = torch.tensor(ids[1:], device=x_ND.device)
        for part_ND, part_N in zip(x_ND[: len(ids) - 1].split(LOGIT_ROWS), following_N.split(LOGIT_ROWS), strict=True):
            logprobs_NV = torch.log_softmax(self._runner.logits(part_ND).float(), dim=-1)
            values += logprobs_NV.gather(1, part_N[:, None])[:, 0].tolist()
        return values

    # ------------------------------------------------------------------------ scheduling

    def _check(self, request: Request) -> None:
        assert request.prompt, "a prompt has at least one token"
        assert request.max_new_tokens > 0
        assert request.grammar is None or request.stop_ids, "a grammar's texts end with a stop token"
        assert len(request.prompt) + request.max_new_tokens <= self.context, "longer than a slot"

    def _begin(self, waiting: deque[tuple[int, Request]], free: list[int]) -> list[Running]:
        """Put waiting requests into free slots. Equal prompts that follow each other share one prefill."""
        begun: list[Running] = []
        fills: dict[tuple[int, ...], Fill] = {}
        known = {slot for slot, other in enumerate(self._prompts) if other}
        followers: list[tuple[int, int]] = []
        while waiting and free:
            index, request = waiting.popleft()
            prompt = request.prompt
            # Otherwise the slot whose prompt is least likely to be continued.
            slot = next((s for s in free if self._prompts[s] == prompt), min(free, key=self._used.__getitem__))
            free.remove(slot)
            self._used[slot] = next(self._uses)
            if prompt in fills:
                known.discard(slot)
                followers.append((slot, fills[prompt].slot))
            elif self._prompts[slot] != prompt:
                source, shared = self._longest_shared(prompt, known)
                if source != slot and shared:
                    self.cache.copy_prefix(source, slot, shared)
                if shared < len(prompt):
                    known.discard(slot)
                    fills[prompt] = Fill(slot=slot, ids=prompt, start=shared)
                else:
                    known.add(slot)
                    self._last[slot] = self._last[source]
            else:
                self.cache.rewind(slot)
            self._prompts[slot] = prompt
            constraint = None if request.grammar is None else request.grammar.begin()
            begun.append(
                Running(
                    index=index,
                    request=request,
                    slot=slot,
                    key=key_of(request),
                    constraint=constraint,
                    siblings=self._siblings.setdefault(prompt, Siblings()),
                )
            )
        for fill, x_ND in zip(fills.values(), self._prefill(list(fills.values())), strict=True):
            self._last[fill.slot] = x_ND[len(fill.ids) - 1 - fill.start].clone()
        self.cache.remember([fill.slot for fill in fills.values()])
        if followers:
            slots, leaders = zip(*followers, strict=True)
            self.cache.copy_prefixes(leaders, slots, max(len(self._prompts[slot]) for slot in slots))
            for slot, leader in followers:
                self._last[slot] = self._last[leader]
        for sequence in begun:
            sequence.hidden_D = self._last[sequence.slot]
        return begun

    def _longest_shared(self, prompt: tuple[int, ...], known: Collection[int]) -> tuple[int, int]:
        """(slot, number of first tokens that a prompt in it shares): all of them, or whole segments. `known`: slots
        that have their prompt.
        """
        best, most = 0, 0
        least = self._runner.least_shared
        head = prompt[:least]
        for slot in sorted(known):
            other = self._prompts[slot]
            if other[:least] != head:
                continue
            if other == prompt:
                return slot, len(prompt)
            if self.cache.whole:
                continue
            if self._angles(len(prompt)) != self._angles(len(other)):
                continue
            pairs = zip(prompt[:-1], other, strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt) - 1, len(other)))
            if common // SEGMENT * SEGMENT > most:
                best, most = slot, common // SEGMENT * SEGMENT
        return (best, most) if most >= least else (0, 0)

    def _take(self, sequence: Running, chosen: Chosen, on_token: OnChosen) -> Reason | None:
        """Append tokens up to the one that ends it, and why that one does."""
        request = sequence.request
        for token, logprob in chosen:
            if math.isnan(logprob):
                weight = self.weights.not_finite()
                raise UserError(
                    f"the model's logits are not numbers: {weight or 'no weight'} has NaN or infinity. "
                    f"Fix: use weights of a run that did not diverge, or another model_dtype"
                )
            sequence.filled = False
            sequence.ids.append(token)
            sequence.logprobs.append(logprob)
            if on_token(sequence.index, token, logprob) or token in request.stop_ids:
                return "stop"
            if not sequence.remaining:
                return "length"
            if sequence.constraint is not None:
                sequence.constraint.take(token)
            if sequence.length - 1 in self._switches:
                break  # what follows was chosen with the old angles
        return None

    def _grown(self, running: list[Running]) -> list[Running]:
        """The sequences, of which those whose last token changed the angles of all others go through the layers anew.

        They become new ones: a block of steps that was started before has wrong tokens for the old ones.
        """
        crossed = [n for n, sequence in enumerate(running) if sequence.length - 1 in self._switches]
        fills = [Fill(slot=running[n].slot, ids=running[n].text) for n in crossed]
        for number, fill, x_ND in zip(crossed, fills, self._prefill(fills), strict=True):
            self._prompts[fill.slot] = ()
            running[number] = replace(running[number], hidden_D=x_ND[len(fill.ids) - 1].clone(), filled=True)
        return running

    def _prefill(self, fills: Sequence[Fill]) -> Iterable[Tensor]:
        """See `Runner.prefill`."""
        return self._runner.prefill(fills)
