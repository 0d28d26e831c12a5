"""The plan of an engine: all facts about its pieces that are known before a tensor is allocated.

The engine allocates according to it, and the memory prediction counts with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from surogate_core.dsl.sides import REAL
from surogate_core.dsl.trace import Signature
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.engine.planning.pieces import Piece, pieces
from surogate_core.engine.planning.weight_plan import WeightPlan, plain_layers


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
    numbers: Mapping[str, int]
    """Key of a layer → its number."""

    @classmethod
    def of(cls, assembly: Assembly, *, device: torch.device) -> EnginePlan:
        """Plan for programs that are traced for `device`; nothing is allocated."""
        settings = assembly.settings
        found = pieces(assembly.model, lora=assembly.lora, max_seqlen=settings.max_seqlen)
        positions = torch.zeros(settings.tokens, dtype=torch.int32, device="meta")
        tables = {
            **assembly.model.tables(positions, settings.dtype),
            "cu_seqlens": torch.zeros(settings.borders, dtype=torch.int32, device="meta"),
        }
        if any(piece.sides for piece in found):
            tables[REAL] = torch.zeros(settings.tokens, dtype=torch.bool, device="meta")
        signatures = {name: Signature(tuple(t.shape), t.dtype, device) for name, t in tables.items()}
        plain = plain_layers(found, first=settings.plain_first, last=settings.plain_last)
        rows: dict[str, slice] = {}
        count = 0
        for piece in found[1:-1]:
            rows[piece.key] = slice(count, count + len(piece.slots))
            count += len(piece.slots)
        return cls(
            assembly=assembly,
            pieces=found,
            tables=signatures,
            plain=plain,
            weights=WeightPlan.of(assembly, found, plain=plain, tables=signatures),
            rows=rows,
            numbers={piece.key: number for number, piece in enumerate(found[1:-1])},
        )

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
        return self.pieces[1 + self.numbers[key]]

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
