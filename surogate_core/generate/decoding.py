"""How a GPU runs the layers: whole prompts packed as in training, then blocks of steps that need nothing of the host.

A step embeds the last token of each row, runs the layers, chooses the next token and feeds it back. All that it reads
and writes is in buffers of fixed addresses, so a CUDA graph of it is replayed for every token. The host reads the
tokens of a block at once, and drops those behind an end.

Shape suffixes: N rows, S slots, D features, V vocabulary, B steps of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surogate_core.dsl.mixers import KeyValues, Spec, States, mixing
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.generate.cache import (
    Cache,
    FromCache,
    LastTokens,
    Reader,
    SlotPlaces,
    WholePrompts,
    features_of,
    places_of,
)
from surogate_core.generate.masks import packed_masks, unpacked, words_of
from surogate_core.generate.passes import tables_of
from surogate_core.generate.programs import Layers
from surogate_core.generate.sampling import Rows, choose, filtered, tempered
from surogate_core.generate.sequences import SEGMENT, Chosen, Fill, Running
from surogate_core.generate.weights import Weights
from surogate_core.kernels.registry import using

if TYPE_CHECKING:
    from surogate_core.bundles import Sampling
    from surogate_core.engine.planning.pieces import Piece, Relayed

BLOCK = 8
"""Steps between two looks at the tokens. While the host looks, the next block runs."""
FEWEST = 16
"""Rows of a step for few sequences; for more it has rows for all slots. Row counts are multiples of this.

Which of the two is used depends on the requests alone and not on what was captured before: it decides how products are
added up, and the same requests give the same bits in every process.
"""
COMPILED_ROWS = 32
"""Rows from which layers are compiled: fewer, such as those of a chat, should not wait for a compiler."""
SHORTEST = 256
"""Positions of the shortest step if attention has no kernel. Lengths are powers of two, up to the slots' own."""
SHORTEST_OF_KERNELS = 4096
"""The same with a kernel, which reads a row's own positions only."""
GATHER = 16
"""Slots are filled again when one in GATHER is free: a pass with few tokens costs nearly as much as one with many."""
PREFILL_ROWS = 8192
"""Tokens of prompts that go through the layers together, unless one prompt has more."""
REFERENCE_ROWS = 1024
"""The same where the reference of attention forms the scores of all pairs of them."""
PAIR_BYTES = 20
"""Bytes that it takes for the score of a pair of tokens and a head: the score, hidden, with a sink, and its weight."""
BATCH_ROWS = 65536
"""Tokens of prompts for which each layer is fetched once."""
LOGIT_BYTES = 40
"""Bytes that the choice of a token takes for each logit: sorted scores with their order, probabilities, noise."""
SCORES = 2**27
"""Elements of keys and values that are read at a time for the segments of prompts."""
SCORE_BYTES = 8
"""Bytes that each of them takes: a copy in the model's dtype, one in fp32, and scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """What a step is captured for."""

    rows: int
    longest: int
    filters: bool
    tempered: bool
    penalty: bool
    """Whether some row has a repetition penalty."""
    masked: bool
    """Whether some row has a constraint. Its mask depends on the token before, so the host writes it for each step."""


def why_eager(assembly: Assembly) -> str | None:
    """Why steps are not captured in CUDA graphs; None if they are."""
    settings = assembly.settings
    if settings.device.type != "cuda":
        return "the device is no GPU"
    if not settings.cuda_graphs:
        return "use_cuda_graphs is off"
    if assembly.offloader.moves("weights") or assembly.experts_apart:
        return f"weights are offloaded to the {assembly.offloader.place}"
    if settings.axes.shards_weights:
        return "the GPUs share out the weights"
    return None


def working_bytes(weights: Weights, mixers: Sequence[Sequence[Spec]], slots: int, context: int) -> int:
    """An upper estimate of what prefill and steps allocate besides the cache: activations, keys of segments, logits."""
    plan, itemsize = weights.plan, weights.parameters.dtype.itemsize
    model = plan.assembly.model
    tokens = slots * context
    # A prompt that is longer goes through the layers alone.
    heads = 0
    if any(isinstance(s, States) or places_of(s, context) < context for specs in mixers for s in specs):
        heads = max((s.heads for s in attentions(mixers) if not _offered(weights, s, "attention")), default=0)
    packed = REFERENCE_ROWS if heads else PREFILL_ROWS
    rows, kept = (min(tokens, max(most, context)) for most in (packed, BATCH_ROWS))
    pairs = heads * rows**2 * PAIR_BYTES
    features = max(map(_features, plan.layers), default=0)
    activations = rows * (2 * features + 6 * model.width) * itemsize
    relayed = sum(math.prod(spec.shape) for piece in plan.layers for spec in piece.gives)
    outputs = kept * (2 * model.width + relayed) * itemsize
    keys = min(SCORES, tokens * _widest(mixers)) * SCORE_BYTES
    return activations + outputs + keys + pairs + max(slots, FEWEST) * model.vocab_size * LOGIT_BYTES


def _offered(weights: Weights, spec: KeyValues, op: str) -> bool:
    """Whether a pack has a kernel of an op of attention for this one."""
    return weights.programs.kernels.offers(op, weights.parameters.dtype, spec.extensions)


def _features(piece: Piece) -> int:
    """Outputs of a layer's projections for a token, those of all its experts included."""
    dense, of_experts = sum(slot.outputs for slot in piece.slots), (s.outputs * s.choices for s in piece.experts)
    return dense + sum(of_experts)


class State:
    """The buffers of a step, for as many rows as there are slots."""

    def __init__(self, rows: int, dummy: int, device: torch.device):
        self.dummy, self.device = dummy, device
        self.ids_N, self.slots_N, self.positions_N, self.live_N, self.top_k_N = torch.zeros(
            5, rows, dtype=torch.int64, device=device
        )
        self.temperature_N, self.top_p_N, self.min_p_N, self.penalty_N, self.logprob_temperature_N = torch.ones(
            5, rows, device=device
        )
        self.keys_N2 = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self.numbers_N = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tokens_BN = torch.zeros(2 * BLOCK, rows, dtype=torch.int64, device=device)
        self.logprobs_BN = torch.zeros(2 * BLOCK, rows, device=device)
        """Results of two blocks, of which the host reads one while the other runs."""
        self.done = torch.zeros(1, dtype=torch.int64, device=device)
        """The row of the next results."""
        self.clear()

    def clear(self) -> None:
        """No row counts."""
        self.slots_N.fill_(self.dummy)
        for tensor in (self.ids_N, self.positions_N, self.live_N, self.numbers_N, self.done):
            tensor.zero_()

    def load(self, running: Sequence[Running]) -> None:
        """The rows of these sequences; the others do not count."""
        rest = len(self.ids_N) - len(running)
        samplings = [s.request.sampling for s in running]
        one = samplings[0]
        ints = torch.tensor(
            [
                [s.ids[-1] for s in running] + [0] * rest,
                [s.slot for s in running] + [self.dummy] * rest,
                [s.length - 1 for s in running] + [0] * rest,
                [1] * len(running) + [0] * rest,
            ],
            device=self.device,
        )
        for target, values in zip((self.ids_N, self.slots_N, self.positions_N, self.live_N), ints, strict=True):
            target.copy_(values)
        chosen = Rows.of(
            samplings + [one] * rest,
            [s.key for s in running] + [(0, 0)] * rest,
            [len(s.ids) for s in running] + [0] * rest,
            self.device,
        )
        for target, values in (
            (self.temperature_N, chosen.temperature_N),
            (self.top_k_N, chosen.top_k_N),
            (self.top_p_N, chosen.top_p_N),
            (self.min_p_N, chosen.min_p_N),
            (self.penalty_N, chosen.penalty_N),
            (self.logprob_temperature_N, chosen.logprob_temperature_N),
            (self.keys_N2, chosen.keys_N2),
            (self.numbers_N, chosen.positions_N),
        ):
            target.copy_(values)

    def rows(self, kind: StepKind) -> Rows:
        """How the rows of a step choose, as views."""
        count = kind.rows
        return Rows(
            temperature_N=self.temperature_N[:count],
            top_k_N=self.top_k_N[:count],
            top_p_N=self.top_p_N[:count],
            min_p_N=self.min_p_N[:count],
            penalty_N=self.penalty_N[:count],
            keys_N2=self.keys_N2[:count],
            positions_N=self.numbers_N[:count],
            filters=kind.filters,
            logprob_temperature_N=self.logprob_temperature_N[:count],
            tempered=kind.tempered,
        )

    def advance(self, count: int, tokens_N: Tensor, logprobs_N: Tensor, last: int) -> None:
        """Feed the chosen tokens back. A row stays at position `last`; one that does not count stays at 0."""
        self.tokens_BN[:, :count].index_copy_(0, self.done, tokens_N[None])
        self.logprobs_BN[:, :count].index_copy_(0, self.done, logprobs_N[None])
        self.ids_N[:count] = tokens_N
        self.positions_N[:count].add_(self.live_N[:count]).clamp_(max=last)
        self.numbers_N[:count].add_(1)
        self.done.add_(1)


class StartedSteps:
    """Steps that were started, whose tokens the host reads later."""

    def __init__(self, state: State, running: Sequence[Running], first: int, steps: int):
        """Call it when the steps are queued: what the device is given later does not delay the results."""
        self.running, self.first, self.steps = list(running), first, steps
        results = (tensor[first : first + steps] for tensor in (state.tokens_BN, state.logprobs_BN))
        self._ready = None
        if state.device.type == "cuda":
            pinned = partial(torch.empty_like, device="cpu", pin_memory=True)
            self._results = [pinned(result).copy_(result, non_blocking=True) for result in results]
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:
            self._results = [r.clone() for r in results]

    def read(self) -> dict[int, Chosen]:
        """id of a sequence → its tokens. Waits for the device."""
        if self._ready is not None:
            self._ready.synchronize()
        tokens, logprobs = (result[:, : len(self.running)].t().tolist() for result in self._results)
        return {id(s): list(zip(t, p, strict=True)) for s, t, p in zip(self.running, tokens, logprobs, strict=True)}


class SteppedRunner:
    """Runs the layers in blocks of steps."""

    least_shared = SHORTEST

    def __init__(self, weights: Weights, cache: Cache):
        self.weights, self.cache = weights, cache
        assembly = weights.plan.assembly
        self.eager = why_eager(assembly)
        """Why steps are not captured, or None."""
        self._mixing = FromCache(cache)
        self._widest = _widest(cache.mixers)
        self._table = weights.programs.kernels
        compiles = assembly.settings.compiler == "inductor"
        # The reference of attention would form the scores of all pairs of tokens of a pass.
        kernel = self._has_kernel("attention")
        self._packs, self._most = cache.whole or kernel, PREFILL_ROWS if kernel else REFERENCE_ROWS
        self._shortest = SHORTEST_OF_KERNELS if self._has_kernel("slot_attention") else SHORTEST
        self.gather = max(1, cache.slots // GATHER)
        self._layers = Layers(weights, COMPILED_ROWS if compiles else None)
        self._state = State(self._rows_for(cache.slots), cache.slots, weights.device)
        self._graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}
        self._loaded: list[Running] = []
        """The sequences whose rows the buffers have. Those that have ended run on, until a slot is filled again."""
        self._ahead: StartedSteps | None = None
        """The block after the one that was read last."""
        self._first_result = 0
        """The row of the results of the block that was started last."""
        self._rows = 0
        """The rows of the last step."""
        self._keeps_rows = False
        """Whether the next block has as many, although it is loaded anew: its step was not captured in time."""
        self._reach = 0
        """The largest position of a row of the buffers."""
        self._seen_SV: Tensor | None = None
        """For each slot the tokens that a repetition penalty applies to."""
        self._masks_NW: Tensor | None = None
        """For each row of a step the tokens that it may choose."""

    def _has_kernel(self, op: str) -> bool:
        """Whether a pack has a kernel of an op of attention for every attention of the model."""
        return all(_offered(self.weights, spec, op) for spec in attentions(self.cache.mixers))

    # -------------------------------------------------------------------------- prompts

    def prefill(self, fills: Sequence[Fill]) -> Iterator[Tensor]:
        """The last layer's output for the tokens of each prompt from its start on."""
        begin = 0
        while begin < len(fills):
            end, rows = begin, 0
            while end < len(fills) and (end == begin or rows + len(fills[end].ids) <= BATCH_ROWS):
                rows += len(fills[end].ids)
                end += 1
            yield from self._prefill(fills[begin:end])
            begin = end

    def _prefill(self, fills: Sequence[Fill]) -> list[Tensor]:
        whole = [number for number, fill in enumerate(fills) if self._packs and not fill.start]
        parts = [number for number, fill in enumerate(fills) if not self._packs or fill.start]
        passes = [*self._packed(fills, whole), *self._segmented(fills, parts)]
        xs = [self.weights.embedded(one.ids_N) for one in passes]
        tables = [tables_of(self.weights, p.ids_N, p.positions_N, p.lasts_N, p.real_N) for p in passes]
        with using(self._table), mixing(self._mixing):
            for number, layer in enumerate(self._layers.of(None)):
                for index, one in enumerate(passes):
                    self._mixing.begin(number, one.reader)
                    xs[index] = layer(xs[index], tables[index], one.relayed)
        found: list[list[Tensor]] = [[] for _ in fills]
        for one, x_ND in zip(passes, xs, strict=True):
            for number, rows in one.rows:
                found[number].append(x_ND[rows])
        return [torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in found]

    def _packed(self, fills: Sequence[Fill], chosen: Sequence[int]) -> Iterator[_Pass]:
        """Passes of whole prompts."""
        group: list[int] = []
        for number in [*chosen, None]:
            rows = sum(len(fills[n].ids) for n in group)
            if group and (number is None or rows + len(fills[number].ids) > self._most):
                yield self._documents(fills, group)
                group = []
            if number is not None:
                group.append(number)

    def _documents(self, fills: Sequence[Fill], group: Sequence[int]) -> _Pass:
        lengths = [len(fills[n].ids) for n in group]
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        rest = -ends[-1] % FEWEST
        device = self.weights.device
        sizes = torch.tensor([*lengths, rest], device=device)
        slots = torch.tensor([*(fills[n].slot for n in group), self.cache.slots], device=device)
        starts = torch.tensor(ends, device=device)
        total = ends[-1] + rest
        positions_N = torch.arange(total, device=device) - starts.repeat_interleave(sizes, output_size=total)
        lasts_N = (sizes - 1).repeat_interleave(sizes, output_size=total)
        borders = [*ends, total] if rest else ends
        return _Pass(
            ids_N=torch.tensor([i for n in group for i in fills[n].ids] + [0] * rest, device=device),
            positions_N=positions_N,
            lasts_N=lasts_N,
            real_N=torch.arange(total, device=device) < ends[-1],
            reader=WholePrompts(
                slots_D=slots if rest else slots[:-1],
                slots_N=slots.repeat_interleave(sizes, output_size=total),
                positions_N=positions_N,
                lasts_N=lasts_N,
                cu_seqlens_D=torch.tensor(borders, dtype=torch.int32, device=device),
                longest=max(*lengths, rest),
            ),
            rows=[(n, slice(begin, end)) for n, begin, end in zip(group, ends, ends[1:], strict=False)],
        )

    def _segmented(self, fills: Sequence[Fill], chosen: Sequence[int]) -> Iterator[_Pass]:
        """Passes of prompts of which a part is in their slots already, or that are read from there."""
        segments = [(number, start) for number in chosen for start in fills[number].segments()]
        longest = max((len(fills[number].ids) for number in chosen), default=0)
        size = max(1, SCORES // max(1, longest * self._widest))
        for first in range(0, len(segments), size):
            yield self._segments(fills, segments[first : first + size], -(-longest // SEGMENT) * SEGMENT)

    def _segments(self, fills: Sequence[Fill], some: Sequence[tuple[int, int]], longest: int) -> _Pass:
        device = self.weights.device
        ids, lasts, rows = [], [], []
        for place, (number, start) in enumerate(some):
            tokens = fills[number].ids[start : start + SEGMENT]
            ids += [*tokens, *[0] * (SEGMENT - len(tokens))]
            lasts += [len(fills[number].ids) - 1] * SEGMENT
            rows.append((number, slice(place * SEGMENT, place * SEGMENT + len(tokens))))
        places = SlotPlaces(
            slots_G=torch.tensor([fills[number].slot for number, _ in some], device=device),
            starts_G=torch.tensor([start for _, start in some], device=device),
            width=SEGMENT,
            longest=longest,
        )
        return _Pass(
            ids_N=torch.tensor(ids, device=device),
            positions_N=places.positions(),
            lasts_N=torch.tensor(lasts, device=device),
            real_N=None,
            reader=places,
            rows=rows,
        )

    # ---------------------------------------------------------------------------- steps

    def advance(self, running: Sequence[Running]) -> list[Chosen]:
        """A token of those that were prefilled, otherwise a block of tokens of each."""
        new = [sequence for sequence in running if sequence.filled]
        if new:
            self._loaded = []
            found: dict[int, Chosen] = {id(s): [pair] for s, pair in zip(new, self._first(new), strict=True)}
        else:
            found = self._next(running)
        return [found.get(id(sequence), ()) for sequence in running]

    def _next(self, running: Sequence[Running]) -> dict[int, Chosen]:
        """A block of tokens of each, or of those that were running already. The block after it is started first."""
        block, self._ahead = self._ahead, None
        ids = {id(sequence) for sequence in running}
        if block is None or not any(id(sequence) in ids for sequence in block.running):
            block = self._start(running)
        left = max(s.remaining for s in running) - block.steps
        held = any(sequence.constraint is not None for sequence in self._loaded)
        if self._loaded and not held and left > 0 and self._rows_for(len(running)) == self._rows:
            self._ahead = self._go_on(running, min(BLOCK, left))
        return block.read()

    def _first(self, new: Sequence[Running]) -> list[tuple[int, float]]:
        """The token after each prefill."""
        samplings = [s.request.sampling for s in new]
        rows = Rows.of(samplings, [s.key for s in new], [len(s.ids) for s in new], self.weights.device)
        slots_N = torch.tensor([s.slot for s in new], device=self.weights.device)
        seen_NV = None
        if _penalised(samplings):
            seen_SV = self._seen()
            for sequence in new:
                seen_SV[sequence.slot] = False
                seen_SV[sequence.slot, torch.tensor(sequence.text, device=seen_SV.device)] = True
            seen_NV = seen_SV[slots_N]
        with using(self._table):
            x_ND = torch.stack([s.hidden_D for s in new])
            logits_NV = self.weights.logits(x_ND)
            masks_NW = packed_masks(new, logits_NV.shape[1])
            allowed_NV = None if masks_NW is None else unpacked(masks_NW.to(logits_NV.device), logits_NV.shape[1])
            tokens_N, logprobs_N = choose(logits_NV, rows, seen_NV, allowed_NV)
        if seen_NV is not None:
            self._seen()[slots_N, tokens_N] = True
        return list(zip(tokens_N.tolist(), logprobs_N.tolist(), strict=True))

    def _seen(self) -> Tensor:
        if self._seen_SV is None:
            vocabulary = self.weights.plan.assembly.model.vocab_size
            shape = (self.cache.slots + 1, vocabulary)
            self._seen_SV = torch.zeros(shape, dtype=torch.bool, device=self.weights.device)
        return self._seen_SV

    def _masks(self) -> Tensor:
        if self._masks_NW is None:
            words = words_of(self.weights.plan.assembly.model.vocab_size)
            shape = (len(self._state.ids_N), words)
            self._masks_NW = torch.full(shape, -1, dtype=torch.int32, device=self.weights.device)
        return self._masks_NW

    def _load_masks(self, running: Sequence[Running]) -> None:
        """The masks of the next step; the rows behind those of the sequences do not count."""
        masks_NW = packed_masks(running, self.weights.plan.assembly.model.vocab_size)
        if masks_NW is not None:
            self._masks()[: len(running)].copy_(masks_NW)

    def _start(self, running: Sequence[Running]) -> StartedSteps:
        """Start a block of tokens of each; of one token if some row has a constraint."""
        held = any(sequence.constraint is not None for sequence in running)
        steps = 1 if held else min(BLOCK, max(s.remaining for s in running))
        self._reach = max(s.length for s in running) - 1
        if not self._keeps_rows:
            self._rows = self._rows_for(len(running))
        self._keeps_rows = False
        kind = self._kind(running, steps)
        if self.eager is None and kind not in self._graphs:
            self._capture(kind)
        self._state.load(running)
        self._load_masks(running)
        self._loaded = list(running)
        return self._queue(kind, steps)

    def _go_on(self, running: Sequence[Running], steps: int) -> StartedSteps | None:
        """Start the block after one that the host has not read; None if its step is not captured."""
        kind = self._kind(running, steps)
        if self.eager is None and kind not in self._graphs:
            self._keeps_rows = True
            return None
        return self._queue(kind, steps)

    def _rows_for(self, count: int) -> int:
        return FEWEST if count <= FEWEST else -(-self.cache.slots // FEWEST) * FEWEST

    def _kind(self, running: Sequence[Running], steps: int) -> StepKind:
        samplings = [s.request.sampling for s in running]
        return StepKind(
            rows=self._rows,
            longest=_longest(self._reach + steps, self.cache.context, shortest=self._shortest),
            filters=filtered(samplings),
            tempered=tempered(samplings),
            penalty=_penalised(samplings),
            masked=any(s.constraint is not None for s in running),
        )

    def _queue(self, kind: StepKind, steps: int) -> StartedSteps:
        """Let the device run a block for the rows of the buffers."""
        run = partial(self.step, kind) if self.eager is not None else self._graphs[kind].replay
        self._first_result = BLOCK - self._first_result
        self._state.done.fill_(self._first_result)
        for _ in range(steps):
            run()
        self._reach += steps
        return StartedSteps(self._state, self._loaded, self._first_result, steps)

    def step(self, kind: StepKind) -> None:
        """The next token of every row, on the device alone."""
        state, count = self._state, kind.rows
        slots_N, positions_N = state.slots_N[:count], state.positions_N[:count]
        tables = tables_of(self.weights, state.ids_N[:count], positions_N, positions_N, state.live_N[:count] > 0)
        x_ND, relayed = self.weights.embedded(state.ids_N[:count]), dict[tuple[int, str], Tensor]()
        reader = LastTokens(slots_N=slots_N, positions_N=positions_N, longest=kind.longest)
        with using(self._table), mixing(self._mixing):
            for number, layer in enumerate(self._layers.of(count)):
                self._mixing.begin(number, reader)
                x_ND = layer(x_ND, tables, relayed)
            seen_NV = self._seen()[slots_N] if kind.penalty else None
            rows = state.rows(kind)
            logits_NV = self.weights.logits(x_ND)
            allowed_NV = unpacked(self._masks()[:count], logits_NV.shape[1]) if kind.masked else None
            tokens_N, logprobs_N = choose(logits_NV, rows, seen_NV, allowed_NV)
        if kind.penalty:
            self._seen().index_put_((slots_N, tokens_N), torch.ones((), dtype=torch.bool, device=x_ND.device))
        state.advance(count, tokens_N, logprobs_N, self.cache.context - 1)

    def _capture(self, kind: StepKind) -> None:
        """Capture a step. The rows of the buffers are lost."""
        from surogate_core.engine.graphs import capture_forward

        self._state.clear()
        if kind.penalty:
            self._seen()
        if kind.masked:
            self._masks()
        beside = next(iter(self._graphs.values()), None)

        def run() -> None:
            self._state.done.zero_()
            self.step(kind)

        try:
            self._graphs[kind] = capture_forward(lambda: self.step(kind), warm_up=run, beside=beside)
        except torch.OutOfMemoryError:
            self.eager = "no memory is left for CUDA graphs"

    def logits(self, x_ND: Tensor) -> Tensor:
        """[N, V]: the head."""
        with using(self._table):
            return self.weights.logits(x_ND)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Rows of prompts that go through the layers together."""

    ids_N: Tensor
    positions_N: Tensor
    lasts_N: Tensor
    """The last position of each row's prompt."""
    real_N: Tensor | None
    reader: Reader
    rows: Sequence[tuple[int, slice]]
    """Number of a prompt → its rows, in order."""
    relayed: Relayed = field(default_factory=dict)


def _widest(mixers: Sequence[Sequence[Spec]]) -> int:
    """Most features of keys and values that an attention reads for a position."""
    return max(map(features_of, attentions(mixers)), default=1)


def attentions(mixers: Sequence[Sequence[Spec]]) -> list[KeyValues]:
    """The attentions of all layers."""
    return [spec for specs in mixers for spec in specs if isinstance(spec, KeyValues)]


def _longest(needed: int, context: int, *, shortest: int = SHORTEST) -> int:
    """Positions that a step reads at most."""
    longest = shortest
    while longest < needed:
        longest *= 2
    return min(longest, context)


def _penalised(samplings: Sequence[Sampling]) -> bool:
    return any(s.repetition_penalty != 1 for s in samplings)
