"""How a CPU runs the layers: every row's bits depend on its own request only.

There the result of a row depends on the number of rows that it is multiplied with, but not on its place among them.
Every product therefore has one of two fixed numbers of rows, and a token's number depends on its kind only: `SEGMENT`
rows times `SEGMENTS` for a token of a prompt, `ROWS` for a chosen one. So equal requests give equal bits, whatever else
is in the batch and however many slots there are.

Shape suffixes: N rows, D features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from surogate_core.dsl.mixers import mixing
from surogate_core.dsl.sides import IDS, REAL
from surogate_core.engine.planning.pieces import Relayed
from surogate_core.generate.cache import Cache, FromCache, SlotPlaces, with_own
from surogate_core.generate.drafts import ROWS, Drafts, StepRow, rows_of, separate
from surogate_core.generate.masks import packed_masks, unpacked
from surogate_core.generate.sampling import Rows, choose
from surogate_core.generate.sequences import SEGMENT, Chosen, Fill, Running
from surogate_core.generate.weights import Weights
from surogate_core.kernels.registry import using

SEGMENTS = 4
"""Segments that are prefilled at a time."""
PAYS = 0.1
"""Right drafts of a step, for each running sequence, that are worth its further rows of attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Rows that go through the layers together."""

    ids_N: Tensor
    places: SlotPlaces
    tables: Sequence[Tensor]
    relayed: Relayed = field(default_factory=dict)


class FixedRunner:
    """Runs the layers with fixed numbers of rows, one token of each sequence at a time or one with its drafts."""

    gather = 1
    least_shared = SEGMENT

    def __init__(self, weights: Weights, cache: Cache, *, drafts: bool):
        self.weights, self.cache = weights, cache
        separately = separate(weights.plan.assembly, cache.mixers)
        self.drafts = Drafts(
            allowed=drafts and separately, rows=lambda count: -(-count // ROWS) * ROWS, pays=lambda rows: PAYS
        )
        self._mixing = FromCache(cache)
        self._table = with_own(weights.programs.kernels, grouped_product=tiled_product)

    def prefill(self, fills: Sequence[Fill]) -> list[Tensor]:
        """For each the last layer's output for its tokens from its start on, and behind them for padding."""
        segments = [(number, start) for number, fill in enumerate(fills) for start in fill.segments()]
        passes = []
        for first in range(0, len(segments), SEGMENTS):
            some = segments[first : first + SEGMENTS]
            ids, lasts, places, counts = [], [], [], []
            for number, start in some:
                fill = fills[number]
                tokens = fill.ids[start : start + SEGMENT]
                ids += [*tokens, *[0] * (SEGMENT - len(tokens))]
                lasts += [len(fill.ids) - 1] * SEGMENT
                places.append((fill.slot, start))
                counts.append(len(tokens))
            rest = SEGMENTS - len(some)
            ids += [0] * (rest * SEGMENT)
            lasts += [0] * (rest * SEGMENT)
            places += [(self.cache.slots, 0)] * rest
            counts += [SEGMENT] * rest
            passes.append(self._pass(ids, lasts, places, width=SEGMENT, counts=counts))
        outputs = torch.cat([x_ND.view(SEGMENTS, SEGMENT, -1) for x_ND in self._run(passes)] or [torch.empty(0)])
        found: list[list[Tensor]] = [[] for _ in fills]
        for (number, _), x_ND in zip(segments, outputs, strict=False):
            found[number].append(x_ND)
        return [torch.cat(parts) for parts in found]

    def advance(self, running: Sequence[Running], *, queued: bool) -> list[Chosen]:
        """One token of each, or more by drafts; whatever waits, no bit depends on it."""
        drafts = [] if any(sequence.filled for sequence in running) else self.drafts.of(running)
        rows = rows_of(running, drafts)
        decoded = iter(self._decode([row for row in rows if not row.sequence.filled]))
        hidden = [row.sequence.hidden_D if row.sequence.filled else next(decoded) for row in rows]
        pairs: list[tuple[int, float]] = []
        for first in range(0, len(rows), ROWS):
            some = slice(first, first + ROWS)
            pairs += self._choose(rows[some], hidden[some])
        found = self.drafts.checked(rows, pairs)
        return [found[id(sequence)] for sequence in running]

    def logits(self, x_ND: Tensor) -> Tensor:
        """[N, V], in products of as many rows as are decoded at a time."""
        parts = []
        with using(self._table):
            for part_ND in x_ND.split(ROWS):
                padded = torch.nn.functional.pad(part_ND, (0, 0, 0, ROWS - len(part_ND)))
                parts.append(self.weights.logits(padded)[: len(part_ND)])
        return torch.cat(parts)

    def _decode(self, rows: Sequence[StepRow]) -> list[Tensor]:
        """The last layer's output of each row."""
        passes = []
        for first in range(0, len(rows), ROWS):
            some = rows[first : first + ROWS]
            rest = ROWS - len(some)
            ids = [row.token for row in some] + [0] * rest
            lasts = [row.position for row in some] + [0] * rest
            places = [(row.sequence.slot, row.position) for row in some] + [(self.cache.slots, 0)] * rest
            passes.append(self._pass(ids, lasts, places, width=1))
        return [x_D for x_ND in self._run(passes) for x_D in x_ND][: len(rows)]

    def _choose(self, some: Sequence[StepRow], hidden: Sequence[Tensor]) -> list[tuple[int, float]]:
        rest = ROWS - len(some)
        padded = [*some, *[some[0]] * rest]
        sequences = [row.sequence for row in padded]
        samplings = [s.request.sampling for s in sequences]
        rows = Rows.of(samplings, [s.key for s in sequences], [row.number for row in padded], self.weights.device)
        seen_NV = None
        size = self.weights.plan.assembly.model.vocab_size
        if any(s.repetition_penalty != 1 for s in samplings):
            seen_NV = torch.zeros(ROWS, size, dtype=torch.bool)
            for number, sequence in enumerate(sequences):
                seen_NV[number, list(sequence.text)] = True
        allowed_NV, masks_NW = None, packed_masks(sequences[: len(some)], size)
        if masks_NW is not None:
            masks_NW = torch.nn.functional.pad(masks_NW, (0, 0, 0, rest), value=-1)
            allowed_NV = unpacked(masks_NW, size)
        logits_NV = self.logits(torch.stack([*hidden, *[hidden[0]] * rest]))
        tokens_N, logprobs_N = choose(logits_NV, rows, seen_NV, allowed_NV)
        return list(zip(tokens_N.tolist(), logprobs_N.tolist(), strict=True))[: len(some)]

    def _pass(
        self,
        ids: Sequence[int],
        lasts: Sequence[int],
        places: Sequence[tuple[int, int]],
        *,
        width: int,
        counts: Sequence[int] | None = None,
    ) -> _Pass:
        device = self.weights.device
        slots, starts = (torch.tensor(column, device=device) for column in zip(*places, strict=True))
        where = SlotPlaces(slots_G=slots, starts_G=starts, width=width, counts=counts)
        ids_N, lasts_N = (torch.tensor(numbers, device=device) for numbers in (ids, lasts))
        return _Pass(ids_N=ids_N, places=where, tables=tables_of(self.weights, ids_N, where.positions(), lasts_N))

    def _run(self, passes: Sequence[_Pass]) -> list[Tensor]:
        """The last layer's output of each. Each layer runs for all of them before the next one is fetched."""
        if not passes:
            return []
        xs = [self.weights.embedded(p.ids_N) for p in passes]
        with using(self._table), mixing(self._mixing):
            for number, layer in enumerate(self.weights.layers()):
                for index, one in enumerate(passes):
                    self._mixing.begin(number, one.places)
                    xs[index] = layer(xs[index], one.tables, one.relayed)
        return xs


def tables_of(
    weights: Weights, ids_N: Tensor, positions_N: Tensor, lasts_N: Tensor, real_N: Tensor | None = None
) -> list[Tensor]:
    """What every block reads. A row's angles may depend on the length of its document, which is positions up to
    `lasts_N`; so each row is asked for as a document of its first, this and its last position.
    """
    three = torch.stack([torch.zeros_like(positions_N), positions_N, lasts_N], dim=1).flatten().int()
    tables = weights.plan.assembly.model.tables(three, weights.parameters.dtype)
    borders = torch.zeros(weights.plan.assembly.settings.borders, dtype=torch.int32, device=positions_N.device)
    found = [*(table[1::3].contiguous() for table in tables.values()), borders]  # as programs and kernels expect them
    if REAL in weights.plan.tables:
        found.append(torch.ones_like(positions_N, dtype=torch.bool) if real_N is None else real_N)
    if IDS in weights.plan.tables:
        found.append(ids_N)
    return found


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
