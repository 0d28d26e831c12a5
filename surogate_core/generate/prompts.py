"""How a GPU prefills: whole prompts packed as in training, or segments of prompts that read their slots.

A pass with few rows keeps the host busier than the GPU: some launches for every layer, and with adapters twice as many.
Such a pass has one of few shapes, and its tensors are in buffers of fixed addresses, so the second pass of a shape is
captured in a CUDA graph, which the others replay. A pass with more rows is launched operation by operation.

Shape suffixes: N rows, S documents, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from surogate_core.dsl.mixers import KeyValues, Spec, mixing
from surogate_core.generate.cache import Cache, FromCache, Reader, SlotPlaces, WholePrompts, features_of
from surogate_core.generate.passes import tables_of
from surogate_core.generate.sequences import SEGMENT, Fill
from surogate_core.generate.weights import Weights
from surogate_core.kernels.registry import using

if TYPE_CHECKING:
    from surogate_core.engine.planning.pieces import Piece, Relayed
    from surogate_core.engine.planning.plan import EnginePlan

MULTIPLE = 16
"""Row counts of passes are multiples of this."""
PREFILL_ROWS = 8192
"""Tokens of prompts that go through the layers together, unless one prompt has more."""
REFERENCE_ROWS = 1024
"""The same where the reference of attention forms the scores of all pairs of them."""
BATCH_ROWS = 65536
"""Tokens of prompts for which each layer is fetched once."""
SCORES = 2**27
"""Elements of keys and values that are read at a time for the segments of prompts."""
BUSY = 2**39
"""Multiplications of a layer from which a GPU is busier than the host that launches it, which takes 0.7 to 1.7 ms."""
SHORTEST_OF_KERNELS = 4096
"""Positions that kernels of attention are captured for at least: each row reads its own only."""
MOST_GRAPHS = 64
"""Shapes of passes that are captured."""


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Run it."""


Capture = Callable[[Callable[[], None]], Graph | None]
"""Runs a forward and captures it; None if it did neither, because there are no graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassKind:
    """What a pass is captured for. It depends on the prompts alone."""

    rows: int
    documents: int
    """Whole prompts, and behind them the rows that do not count."""
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Rows of prompts that go through the layers together."""

    ids_N: Tensor
    positions_N: Tensor
    lasts_N: Tensor
    """The last position of each row's prompt."""
    real_N: Tensor | None
    reader: Reader
    relayed: Relayed = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """Whole prompts on the host."""

    kind: PassKind
    of_rows_4N: Tensor
    """Tokens, positions, last positions and slots."""
    of_documents_2S: Tensor
    """The first row of each document and the number of rows; the slots, and one behind them that nobody reads."""


Rows = Sequence[tuple[int, slice]]
"""Numbers of prompts with their rows of a pass, in order."""


class Prompts:
    """Runs the layers over prompts."""

    def __init__(self, weights: Weights, cache: Cache, *, kernel: bool, captured: int, capture: Capture):
        """`kernel`: whether attention over packed documents has one. `captured`: most rows of a pass that is captured.

        `capture`: see `Capture`.
        """
        self.weights, self.cache, self._capture = weights, cache, capture
        # The reference of attention would form the scores of all pairs of tokens of a pass.
        self._packs, self._most = cache.whole or kernel, PREFILL_ROWS if kernel else REFERENCE_ROWS
        self.captured = captured = min(captured, self._most) if self._packs else 0
        self._widest = widest(cache.mixers)
        self._mixing = FromCache(cache)
        self._seen: set[PassKind] = set()
        self.graphs: dict[PassKind, Graph] = {}
        device = weights.device
        self._of_rows = torch.zeros(4, captured, dtype=torch.int64, device=device)
        self._of_documents = torch.zeros(2, cache.slots + 2, dtype=torch.int64, device=device)
        self._found = torch.zeros(captured, weights.model.width, dtype=weights.dtype, device=device)

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
        found: list[list[Tensor]] = [[] for _ in fills]
        passes: list[tuple[_Pass, Rows]] = []
        for group in self._groups(fills, whole):
            packed, rows = self._packed([fills[n] for n in group]), _places(group, fills)
            if packed.kind.rows <= self.captured:
                _share_out(self._alone(packed), rows, found)
            else:
                passes.append((self._pass(packed), rows))
        passes += self._segmented(fills, parts)
        for x_ND, (_, rows) in zip(self._run([one for one, _ in passes]), passes, strict=True):
            _share_out(x_ND, rows, found)
        return [torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in found]

    def _run(self, passes: Sequence[_Pass]) -> list[Tensor]:
        """The last layer's output of each. Each layer runs for all of them before the next one is fetched."""
        if not passes:
            return []
        xs = [self.weights.embedded(one.ids_N) for one in passes]
        tables = [tables_of(self.weights, p.ids_N, p.positions_N, p.lasts_N, p.real_N) for p in passes]
        with using(self.weights.programs.kernels), mixing(self._mixing):
            for number, layer in enumerate(self.weights.layers()):
                for index, one in enumerate(passes):
                    self._mixing.begin(number, one.reader)
                    xs[index] = layer(xs[index], tables[index], one.relayed)
        return xs

    # ---------------------------------------------------------------------------- whole

    def _groups(self, fills: Sequence[Fill], chosen: Sequence[int]) -> Iterator[list[int]]:
        """The numbers of the whole prompts of each pass."""
        group: list[int] = []
        rows = 0
        for number in chosen:
            if group and rows + len(fills[number].ids) > self._most:
                yield group
                group, rows = [], 0
            group.append(number)
            rows += len(fills[number].ids)
        if group:
            yield group

    def _packed(self, fills: Sequence[Fill]) -> _Packed:
        lengths = [len(fill.ids) for fill in fills]
        kind = self._kind(lengths)
        empty = kind.documents - len(fills) - 1
        # By NumPy: torch repeats elements with all its threads, and to wake them takes milliseconds.
        sizes = np.array([*lengths, kind.rows - sum(lengths), *[0] * empty])
        slots = np.array([*(fill.slot for fill in fills), *[self.cache.slots] * (empty + 1)])
        starts = sizes.cumsum() - sizes
        ids = [*chain.from_iterable(fill.ids for fill in fills), *[0] * (kind.rows - sum(lengths))]
        # There may be more rows that do not count than a slot has positions.
        positions_N = (np.arange(kind.rows) - starts.repeat(sizes)) % self.cache.context
        lasts_N = np.minimum(sizes - 1, self.cache.context - 1).repeat(sizes)
        of_documents = [[*starts, kind.rows], [*slots, slots[-1]]]
        return _Packed(
            kind=kind,
            of_rows_4N=torch.from_numpy(np.stack([ids, positions_N, lasts_N, slots.repeat(sizes)])),
            of_documents_2S=torch.from_numpy(np.array(of_documents)),
        )

    def _kind(self, lengths: Sequence[int]) -> PassKind:
        rows = sum(lengths)
        total, documents = padded(rows), len(lengths) + 1
        if total > self.captured:
            total = -(-rows // MULTIPLE) * MULTIPLE
            return PassKind(rows=total, documents=documents, longest=max(*lengths, total - rows))
        documents = min(1 << (documents - 1).bit_length(), self.cache.slots + 1)
        return PassKind(
            rows=total,
            documents=documents,
            longest=longest_of(max(*lengths, total - rows), total, shortest=SHORTEST_OF_KERNELS),
        )

    def _pass(self, packed: _Packed) -> _Pass:
        """The pass with tensors of its own."""
        device = self.weights.device
        return self._of(packed.kind, packed.of_rows_4N.to(device), packed.of_documents_2S.to(device))

    def _of(self, kind: PassKind, of_rows_4N: Tensor, of_documents_2S: Tensor) -> _Pass:
        ids_N, positions_N, lasts_N, slots_N = of_rows_4N
        return _Pass(
            ids_N=ids_N,
            positions_N=positions_N,
            lasts_N=lasts_N,
            real_N=slots_N < self.cache.slots,
            reader=WholePrompts(
                slots_D=of_documents_2S[1, :-1],
                slots_N=slots_N,
                positions_N=positions_N,
                lasts_N=lasts_N,
                cu_seqlens_D=of_documents_2S[0].int(),
                longest=kind.longest,
            ),
        )

    def _alone(self, packed: _Packed) -> Tensor:
        """The last layer's output of a pass with few rows."""
        kind = packed.kind
        of_rows_4N = self._of_rows[:, : kind.rows]
        of_documents_2S = self._of_documents[:, : kind.documents + 1]
        of_rows_4N.copy_(packed.of_rows_4N)
        of_documents_2S.copy_(packed.of_documents_2S)

        def run() -> Tensor:
            return self._run([self._of(kind, of_rows_4N, of_documents_2S)])[0]

        def forward() -> None:
            self._found[: kind.rows] = run()

        if kind in self.graphs:
            self.graphs[kind].replay()
            return self._found[: kind.rows].clone()
        graph = None
        if kind in self._seen and len(self.graphs) < MOST_GRAPHS:
            graph = self._capture(forward)
        self._seen.add(kind)
        if graph is None:
            return run()
        self.graphs[kind] = graph
        return self._found[: kind.rows].clone()

    # ------------------------------------------------------------------------- segments

    def _segmented(self, fills: Sequence[Fill], chosen: Sequence[int]) -> Iterator[tuple[_Pass, Rows]]:
        """Passes of prompts of which a part is in their slots already, or that are read from there."""
        segments = [(number, start) for number in chosen for start in fills[number].segments()]
        longest = max((len(fills[number].ids) for number in chosen), default=0)
        size = max(1, SCORES // max(1, longest * self._widest))
        for first in range(0, len(segments), size):
            yield self._segments(fills, segments[first : first + size], -(-longest // SEGMENT) * SEGMENT)

    def _segments(self, fills: Sequence[Fill], some: Sequence[tuple[int, int]], longest: int) -> tuple[_Pass, Rows]:
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
        one = _Pass(
            ids_N=torch.tensor(ids, device=device),
            positions_N=places.positions(),
            lasts_N=torch.tensor(lasts, device=device),
            real_N=None,
            reader=places,
        )
        return one, rows


def _places(group: Sequence[int], fills: Sequence[Fill]) -> Rows:
    ends = accumulate(len(fills[number].ids) for number in group)
    return [(n, slice(end - len(fills[n].ids), end)) for n, end in zip(group, ends, strict=True)]


def _share_out(x_ND: Tensor, rows: Rows, found: list[list[Tensor]]) -> None:
    for number, some in rows:
        found[number].append(x_ND[some])


def padded(rows: int) -> int:
    """Rows of a pass that is captured: four numbers between two powers of two."""
    return -(-rows // _step(rows)) * _step(rows)


def _step(rows: int) -> int:
    """The distance of the shapes between the powers of two below and above, or at, this number of rows."""
    return max(MULTIPLE, 1 << (rows - 1).bit_length() >> 3)


def captured_rows(plan: EnginePlan) -> int:
    """Most rows of a pass for which the host takes longer than the GPU, rounded down to a shape of `padded`."""
    most = min(PREFILL_ROWS, BUSY // max(1, max(map(_multiplications, plan.layers), default=1)))
    return most // _step(most + 1) * _step(most + 1)


def _multiplications(piece: Piece) -> int:
    """Those of a layer's projections for a token, with the experts that it chooses."""
    dense = sum(slot.inputs * slot.outputs for slot in piece.slots)
    return dense + sum(s.inputs * s.outputs * s.choices for s in piece.experts)


def attentions(mixers: Sequence[Sequence[Spec]]) -> list[KeyValues]:
    """The attentions of all layers."""
    return [spec for specs in mixers for spec in specs if isinstance(spec, KeyValues)]


def widest(mixers: Sequence[Sequence[Spec]]) -> int:
    """Most features of keys and values that an attention reads for a position."""
    return max(map(features_of, attentions(mixers)), default=1)


def longest_of(needed: int, most: int, *, shortest: int) -> int:
    """Positions that kernels are captured for: a power of two, at least `shortest` and at most `most`."""
    longest = shortest
    while longest < needed:
        longest *= 2
    return min(longest, most)
