"""How a GPU runs the layers: prompts by `prompts`, then blocks of steps that need nothing of the host.

A step embeds the last token of each row, runs the layers, chooses the next token and feeds it back. All that it reads
and writes is in buffers of fixed addresses, so a CUDA graph of it is replayed for every token. The host reads the
tokens of a block at once, and drops those behind an end.

Shape suffixes: N rows, S slots, D features, V vocabulary, B steps of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from surogate_core.dsl.mixers import KeyValues, Spec, States, mixing
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.generate.cache import Cache, FromCache, LastTokens, places_of
from surogate_core.generate.drafts import Drafts, StepRow, rows_of, separate
from surogate_core.generate.masks import packed_masks, unpacked, words_of
from surogate_core.generate.passes import tables_of
from surogate_core.generate.programs import Layers
from surogate_core.generate.prompts import (
    BATCH_ROWS,
    PREFILL_ROWS,
    REFERENCE_ROWS,
    SCORES,
    SHORTEST_OF_KERNELS,
    Prompts,
    attentions,
    captured_rows,
    longest_of,
    padded,
    widest,
)
from surogate_core.generate.sampling import FLOATS, Rows, choose, filtered, floats_of, tempered
from surogate_core.generate.sequences import Chosen, Fill, Running
from surogate_core.generate.weights import Weights
from surogate_core.kernels.registry import using

if TYPE_CHECKING:
    from surogate_core.bundles import Sampling
    from surogate_core.engine.planning.pieces import Piece

BLOCK = 8
"""Steps between two looks at the tokens. While the host looks, the next block runs."""
FEWEST = 16
"""Rows of a step for few sequences; for more it has rows for all slots. Row counts are multiples of this.

Which of the two is used depends on the requests alone and not on what was captured before: it decides how products are
added up, and the same requests give the same bits in every process.
"""
SHORTEST = 256
"""Positions of the shortest step if attention has no kernel. Lengths are powers of two, up to the slots' own."""
GATHER = 16
"""Slots are filled again when one in GATHER is free: a pass with few tokens costs nearly as much as one with many."""
LARGEST = 2**31 - 1
"""What the host sends is int32; as `top_k` it keeps every token, like all larger numbers."""
HOST, HOST_ROW = 2e-4, 1.6e-5
"""Seconds that a step with drafts takes longer, and of each of its rows: the host loads them, and is waited for."""
LAYER, BYTES = 4e-5, 4e12
"""Seconds of a step's layer besides its weights, and their bytes that are read in a second. Those of an H200: where a
step takes longer, drafts would pay sooner than is assumed.
"""
PAIR_BYTES = 20
"""Bytes that it takes for the score of a pair of tokens and a head: the score, hidden, with a sink, and its weight."""
LOGIT_BYTES = 40
"""Bytes that the choice of a token takes for each logit: sorted scores with their order, probabilities, noise."""
SCORE_BYTES = 8
"""Bytes that an element of the keys of segments takes: a copy in the model's dtype, one in fp32, and scores."""


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
    drafted: bool = False
    """Whether a sequence may have several rows."""


def why_eager(assembly: Assembly) -> str | None:
    """Why steps and passes of prompts are not captured in CUDA graphs; None if they are."""
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
    # What passes in graphs use remains theirs.
    captured = 0 if why_eager(plan.assembly) else min(padded(tokens), captured_rows(plan), packed)
    pairs = heads * (rows**2 + captured**2) * PAIR_BYTES
    features = max(map(_features, plan.layers), default=0)
    activations = (rows + captured) * (2 * features + 6 * model.width) * itemsize
    relayed = sum(math.prod(spec.shape) for piece in plan.layers for spec in piece.gives)
    outputs = kept * (2 * model.width + relayed) * itemsize
    keys = min(SCORES, tokens * widest(mixers)) * SCORE_BYTES
    return activations + outputs + keys + pairs + max(slots, FEWEST) * model.vocab_size * LOGIT_BYTES


def step_seconds(weights: Weights) -> float:
    """A lower estimate of what a step takes, if layers have no experts: they and their weights, which it reads."""
    plan = weights.plan
    elements = sum(math.prod(spec.shape) for piece in (*plan.layers, plan.head) for spec in piece.specs)
    return LAYER * len(plan.layers) + elements * weights.dtype.itemsize / BYTES


def _offered(weights: Weights, spec: KeyValues, op: str) -> bool:
    """Whether a pack has a kernel of an op of attention for this one."""
    return weights.programs.kernels.offers(op, weights.parameters.dtype, spec.extensions)


def _features(piece: Piece) -> int:
    """Outputs of a layer's projections for a token, those of all its experts included."""
    dense, of_experts = sum(slot.outputs for slot in piece.slots), (s.outputs * s.choices for s in piece.experts)
    return dense + sum(of_experts)


class State:
    """The buffers of a step, for as many rows as there are slots. What the host loads comes in one copy."""

    def __init__(self, rows: int, dummy: int, device: torch.device):
        self.dummy, self.device = dummy, device
        self._longs_5N = torch.zeros(5, rows, dtype=torch.int64, device=device)
        self.ids_N, self.slots_N, self.positions_N, self.live_N, self.top_k_N = self._longs_5N
        self._floats_FN = torch.ones(len(FLOATS), rows, device=device)
        self._ints = torch.zeros(3 * rows, dtype=torch.int32, device=device)
        self.keys_N2, self.numbers_N = self._ints[: 2 * rows].view(rows, 2), self._ints[2 * rows :]
        self._loaded = torch.empty((5 + len(FLOATS) + 3) * rows, dtype=torch.int32, device=device)
        """All of these in 32 bits, as the host sends them."""
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

    def load(self, rows: Sequence[StepRow]) -> None:
        """These rows; the others do not count."""
        count, most = len(rows), len(self.ids_N)
        longs, floats = np.zeros((5, most), np.int32), np.ones((len(FLOATS), most), np.float32)
        keys, numbers = np.zeros((most, 2), np.int32), np.zeros(most, np.int32)
        longs[1, count:] = self.dummy
        longs[:, :count] = np.array(
            [(row.token, row.sequence.slot, row.position, 1, min(row.sampling.top_k, LARGEST)) for row in rows]
        ).T
        floats[:, :count] = np.array([floats_of(row.sampling) for row in rows]).T
        keys[:count] = [row.sequence.key for row in rows]
        numbers[:count] = [row.number for row in rows]
        parts = longs, floats.view(np.int32), keys, numbers
        self._loaded.copy_(torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts])))
        longs_5N, floats_FN, ints = self._loaded.split([self._longs_5N.numel(), self._floats_FN.numel(), 3 * most])
        self._longs_5N.copy_(longs_5N.view_as(self._longs_5N))
        self._floats_FN.copy_(floats_FN.view(torch.float32).view_as(self._floats_FN))
        self._ints.copy_(ints)

    def rows(self, kind: StepKind) -> Rows:
        """How the rows of a step choose, as views."""
        count = kind.rows
        return Rows(
            **dict(zip(FLOATS, self._floats_FN[:, :count], strict=True)),
            top_k_N=self.top_k_N[:count],
            keys_N2=self.keys_N2[:count],
            positions_N=self.numbers_N[:count],
            filters=kind.filters,
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
        return {id(s): chosen for s, chosen in zip(self.running, self.of_rows(len(self.running)), strict=True)}

    def of_rows(self, count: int) -> list[Chosen]:
        """The tokens of the first rows. Waits for the device."""
        if self._ready is not None:
            self._ready.synchronize()
        tokens, logprobs = (result[:, :count].t().tolist() for result in self._results)
        return [list(zip(t, p, strict=True)) for t, p in zip(tokens, logprobs, strict=True)]


class SteppedRunner:
    """Runs the layers in blocks of steps, or a step with drafts."""

    least_shared = SHORTEST

    def __init__(self, weights: Weights, cache: Cache, *, drafts: bool):
        self.weights, self.cache = weights, cache
        assembly = weights.plan.assembly
        self.eager = why_eager(assembly)
        """Why nothing is captured, or None."""
        self._mixing = FromCache(cache)
        self._table = weights.programs.kernels
        self._shortest = SHORTEST_OF_KERNELS if self._has_kernel("slot_attention") else SHORTEST
        self.gather = max(1, cache.slots // GATHER)
        step = step_seconds(weights)
        self.drafts = Drafts(
            allowed=drafts and self._exact(), rows=self._rows_for, pays=lambda rows: (HOST + HOST_ROW * rows) / step
        )
        self.prompts = Prompts(
            weights,
            cache,
            kernel=self._has_kernel("attention"),
            captured=captured_rows(weights.plan) if self.eager is None else 0,
            capture=lambda forward: self._captured(forward, forward),
        )
        self._layers = Layers(weights, compiles=assembly.settings.compiler == "inductor")
        self._state = State(self._rows_for(cache.slots), cache.slots, weights.device)
        self._graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}
        self._beside: torch.cuda.CUDAGraph | None = None
        """A graph whose memory the others share: none runs while another one does."""
        self._loaded: list[Running] = []
        """The sequences whose rows the buffers have. Those that have ended run on, until a slot is filled again."""
        self._ahead: StartedSteps | None = None
        """The block after the one that was read last."""
        self._first_result = 0
        """The row of the results of the block that was started last."""
        self._rows = 0
        """The rows of the last step."""
        self._late: list[Running] = []
        """The sequences of the block after the one that was read last, if its step was not captured in time. It is
        loaded anew with as many rows.
        """
        self._reach = 0
        """The largest position of a row of the buffers."""
        self._seen_SV: Tensor | None = None
        """For each slot the tokens that a repetition penalty applies to."""
        self._masks_NW: Tensor | None = None
        """For each row of a step the tokens that it may choose."""

    def _exact(self) -> bool:
        """Whether drafts change no bit.

        They change which tokens of different sequences are chosen in one step. So how many rows an expert has may not
        matter, nor `longest`, up to which attention without a kernel adds up, nor which texts change their angles
        together and are prefilled together.
        """
        model, plan = self.weights.model, self.weights.plan
        by_position = self._has_kernel("slot_attention") or self.cache.context <= self._shortest
        separately = separate(plan.assembly, self.cache.mixers) and not any(piece.experts for piece in plan.layers)
        return by_position and separately and not model.switches

    def _has_kernel(self, op: str) -> bool:
        """Whether a pack has a kernel of an op of attention for every attention of the model."""
        return all(_offered(self.weights, spec, op) for spec in attentions(self.cache.mixers))

    def prefill(self, fills: Sequence[Fill]) -> Iterator[Tensor]:
        """The last layer's output for the tokens of each prompt from its start on."""
        return self.prompts.prefill(fills)

    # ---------------------------------------------------------------------------- steps

    def advance(self, running: Sequence[Running], *, queued: bool) -> list[Chosen]:
        """A token of those that were prefilled, otherwise a block of tokens of each, or a step with drafts.

        Requests that wait are prefilled together when sequences end, which drafts may change, and so the rows of a
        pass; then there are none.
        """
        new = [sequence for sequence in running if sequence.filled]
        if new:
            self._loaded = []
            found: dict[int, Chosen] = {id(s): [pair] for s, pair in zip(new, self._first(new), strict=True)}
        else:
            found = self._next(running, drafting=not queued)
        return [found.get(id(sequence), ()) for sequence in running]

    def _next(self, running: Sequence[Running], *, drafting: bool) -> dict[int, Chosen]:
        """A block of tokens of each, or of those that were running already. The block after it is started first, unless
        drafts, which need the tokens before, probably pay.
        """
        block, self._ahead = self._ahead, None
        ids = {id(sequence) for sequence in running}
        late, self._late = [sequence for sequence in self._late if id(sequence) in ids], []
        if late:
            block = self._start(late, rows=self._rows)
            self._loaded = late if len(late) == len(running) else []
        elif block is None or not any(id(sequence) in ids for sequence in block.running):
            drafts = self.drafts.of(running) if drafting else []
            if drafts:
                return self._checked(running, drafts)
            block = self._start(running, rows=self._rows_for(len(running)))
        left = max(s.remaining for s in running) - block.steps
        held = any(sequence.constraint is not None for sequence in self._loaded)
        waits = drafting and self.drafts.likely(running)
        if self._loaded and not (held or waits) and left > 0 and self._rows_for(len(running)) == self._rows:
            self._ahead = self._go_on(running, min(BLOCK, left))
        return block.read()

    def _checked(self, running: Sequence[Running], drafts: Sequence[Sequence[int]]) -> dict[int, Chosen]:
        """The tokens of a step with drafts. Its results are read at once, and the next step is loaded anew."""
        rows = rows_of(running, drafts)
        self._rows = self._rows_for(len(running))
        step = self._load(running, rows, 1)
        self._loaded = []
        return self.drafts.checked(rows, [pair for (pair,) in step.of_rows(len(rows))])

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

    def _start(self, running: Sequence[Running], *, rows: int) -> StartedSteps:
        """Start a block of tokens of each; of one token if some row has a constraint."""
        held = any(sequence.constraint is not None for sequence in running)
        steps = 1 if held else min(BLOCK, max(s.remaining for s in running))
        self._rows = rows
        return self._load(running, rows_of(running), steps)

    def _load(self, running: Sequence[Running], rows: Sequence[StepRow], steps: int) -> StartedSteps:
        """Start steps with these rows."""
        self._reach = max(row.position for row in rows)
        kind = replace(self._kind(running, steps), drafted=len(rows) > len(running))
        if self.eager is None and kind not in self._graphs:
            self._capture(kind)
        self._state.load(rows)
        self._load_masks(running)
        self._loaded = list(running)
        return self._queue(kind, steps)

    def _go_on(self, running: Sequence[Running], steps: int) -> StartedSteps | None:
        """Start the block after one that the host has not read; None if its step is not captured."""
        kind = self._kind(running, steps)
        if self.eager is None and kind not in self._graphs:
            self._late = self._loaded
            return None
        return self._queue(kind, steps)

    def _rows_for(self, count: int) -> int:
        return FEWEST if count <= FEWEST else -(-self.cache.slots // FEWEST) * FEWEST

    def _kind(self, running: Sequence[Running], steps: int) -> StepKind:
        samplings = [s.request.sampling for s in running]
        return StepKind(
            rows=self._rows,
            longest=longest_of(self._reach + steps, self.cache.context, shortest=self._shortest),
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
        reader = LastTokens(slots_N=slots_N, positions_N=positions_N, longest=kind.longest, drafted=kind.drafted)
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
        self._state.clear()
        if kind.penalty:
            self._seen()
        if kind.masked:
            self._masks()

        def run() -> None:
            self._state.done.zero_()
            self.step(kind)

        graph = self._captured(lambda: self.step(kind), run)
        if graph is not None:
            self._graphs[kind] = graph

    def _captured(self, forward: Callable[[], None], warm_up: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """The graph of a forward, after `warm_up` has run; None if nothing is captured."""
        from surogate_core.engine.graphs import capture_forward

        if self.eager is not None:
            return None
        try:
            graph = capture_forward(forward, warm_up=warm_up, beside=self._beside)
        except torch.OutOfMemoryError:
            self.eager = "no memory is left for CUDA graphs"
            return None
        self._beside = self._beside or graph
        return graph

    def logits(self, x_ND: Tensor) -> Tensor:
        """[N, V]: the head."""
        with using(self._table):
            return self.weights.logits(x_ND)


def _penalised(samplings: Sequence[Sampling]) -> bool:
    return any(s.repetition_penalty != 1 for s in samplings)
