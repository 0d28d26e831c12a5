"""The plan of an engine: all facts about its pieces that are known before a tensor is allocated.

The engine allocates according to it, and the memory prediction counts with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.experts import EXPERT
from surogate_core.dsl.sides import IDS, REAL
from surogate_core.dsl.trace import Signature
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.engine.planning.pieces import Piece, of_one_rank, pieces
from surogate_core.engine.planning.weight_plan import WeightPlan, plain_layers
from surogate_core.kernels.balancing.plan import LoadBalance
from surogate_core.kernels.expert_ranks import ExpertRanks
from surogate_core.kernels.heads import SharedRows
from surogate_core.kernels.linked import Linked, among
from surogate_core.mesh.axes import Axes, AxisName


def linked_of(axes: Axes) -> dict[AxisName, Linked]:
    """The groups of ranks among which programs exchange values, by their axis. They are not open."""
    found: dict[AxisName, Linked] = {}
    if axes.context > 1:
        found["context"] = SharedRows(axes.context)
    if axes.expert > 1:
        balance = None if axes.expert_balance is None else LoadBalance(threshold=axes.expert_balance)
        found["expert"] = ExpertRanks(axes.expert, rows=axes.expert_rows, balance=balance)
    return found


def _takers(layers: Sequence[Piece]) -> dict[tuple[int, str], tuple[str, ...]]:
    found: dict[tuple[int, str], tuple[str, ...]] = {}
    for piece in layers:
        for source in piece.sources:
            found[source] = (*found.get(source, ()), piece.key)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The pieces of a run's model, and how each is stored and multiplied."""

    assembly: Assembly
    pieces: tuple[Piece, ...]
    """The embedding, the layers in order, and the head."""
    tables: Mapping[str, Signature]
    """The tensors that every block reads, by name, in the order in which they are passed."""
    plain: frozenset[str]
    """Keys of the layers that multiply plainly under every recipe."""
    weights: WeightPlan
    rows: Mapping[str, slice]
    """Key of a layer → its rows in the recipe's state, one row per slot."""
    by_key: Mapping[str, Piece]
    """Key of a layer → the layer."""
    takers: Mapping[tuple[int, str], tuple[str, ...]]
    """(number of a layer, name) of what it gives to later layers → their keys, in order."""

    @classmethod
    def of(cls, assembly: Assembly, *, device: torch.device) -> EnginePlan:
        """Plan for programs that are traced for `device`; nothing is allocated."""
        settings = assembly.settings
        found = pieces(assembly.model, lora=assembly.lora, max_seqlen=settings.max_seqlen)
        sharing = settings.axes.expert
        if sharing > 1:
            found = tuple(
                of_one_rank(piece, sharing, balanced=settings.axes.expert_balance is not None) for piece in found
            )
        positions = torch.zeros(settings.tokens, dtype=torch.int32, device="meta")
        tables = {
            **assembly.model.tables(positions, settings.dtype),
            "cu_seqlens": torch.zeros(settings.borders, dtype=torch.int32, device="meta"),
        }
        if any(piece.sides for piece in found):
            tables[REAL] = torch.zeros(settings.tokens, dtype=torch.bool, device="meta")
        if any(piece.block is not None and piece.block.reads_ids for piece in found):
            tables[IDS] = torch.zeros(settings.tokens, dtype=torch.int64, device="meta")
        signatures = {name: Signature(tuple(t.shape), t.dtype, device) for name, t in tables.items()}
        plain = plain_layers(found, first=settings.plain_first, last=settings.plain_last)
        rows: dict[str, slice] = {}
        count = 0
        for piece in found[1:-1]:
            rows[piece.key] = slice(count, count + len(piece.slots))
            count += len(piece.slots)
        with among(*linked_of(settings.axes).values()):
            weights = WeightPlan.of(assembly, found, plain=plain, tables=signatures)
        return cls(
            assembly=assembly,
            pieces=found,
            tables=signatures,
            plain=plain,
            weights=weights,
            rows=rows,
            by_key={piece.key: piece for piece in found[1:-1]},
            takers=_takers(found[1:-1]),
        )

    def last_taken(self, piece: Piece) -> list[tuple[int, str]]:
        """What no layer takes after this one."""
        return [source for source in piece.sources if self.takers[source][-1] == piece.key]

    def first_taken(self, piece: Piece) -> list[tuple[int, str]]:
        """What no layer takes before this one, so that its backward is the last to read it."""
        return [source for source in piece.sources if self.takers[source][0] == piece.key]

    @property
    def relayed_bytes(self) -> int:
        """Bytes of what layers give to later ones. Each value, or its gradient, is there for most of a micro-step, and
        both are there where several layers take it.
        """
        settings = self.assembly.settings
        shapes = {(piece.number, spec.name): spec.shape for piece in self.layers for spec in piece.gives}
        elements = sum(math.prod(shapes[s]) * min(len(keys), 2) for s, keys in self.takers.items())
        return elements * settings.tokens * settings.dtype.itemsize

    def moved_bytes(self, *, counted: bool) -> int:
        """Bytes that a rank sends in a micro-step so that others compute rows of its experts: their tensors before each
        forward and backward, and the gradients of those that are trained. `counted`: another forward counts tokens.
        """
        settings, axes = self.assembly.settings, self.assembly.settings.axes
        if axes.expert_balance is None:
            return 0
        balance = LoadBalance(threshold=axes.expert_balance)

        def sent(spec: TensorSpec) -> int:
            size = math.prod(spec.shape[1:]) * spec.dtype_in(settings.dtype).itemsize
            return balance.taken(axes.expert, spec.shape[0]) * size * (2 + counted + spec.trainable)

        return sum(sent(spec) for piece in self.layers for spec in piece.specs if EXPERT in spec.hf_name)

    @property
    def embed(self) -> Piece:
        """The embedding."""
        return self.pieces[0]

    @property
    def layers(self) -> tuple[Piece, ...]:
        """The layers in order."""
        return self.pieces[1:-1]

    def layer(self, key: str) -> Piece:
        """The layer of a key."""
        return self.by_key[key]

    @property
    def head(self) -> Piece:
        """The final norm and the LM head."""
        return self.pieces[-1]

    @property
    def slots(self) -> int:
        """Number of rows of the recipe's state."""
        return sum(len(piece.slots) for piece in self.layers)

    @property
    def train_embedding(self) -> bool:
        """Whether the embedding is trained."""
        return self.embed.specs[0].trainable
