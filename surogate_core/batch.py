"""The micro-batch, which the data side passes to the engine.

Shape suffixes: N tokens of a micro-batch (rows × sequence_len, flattened), S document borders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_LABEL = -100
"""Label of a position that carries no loss."""
WEIGHTS = "weights"
"""The column that multiplies each position's loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """What all ranks know of a micro-batch that one of them runs."""

    tokens: int
    """Tokens that are not padding."""
    label_tokens: int
    """Positions that carry loss."""
    loss_weight: float
    """What it adds to the divisor of its step's summed loss."""
    pairs: int
    """Pairs of a token and a token that it attends to, itself included, without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed rows, flattened, on the host. All shapes are the same in every micro-batch of a run.

    Labels are already shifted: `labels[t]` is the token that position t predicts, `IGNORE_LABEL` where nothing is
    learnt, as at the last position of every document. Padding is a separate document without labels.
    """

    input_ids: Tensor
    """[N] int64."""
    labels: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int32, restarting at 0 in each document."""
    cu_seqlens: Tensor
    """[S] int32, the borders of the documents in the flattened row: 0, …, N, then N repeated."""
    max_seqlen: int
    """Largest length of a document, the same for the whole run (= sequence_len)."""
    tokens: int
    """Tokens that are not padding."""
    label_tokens: int
    """Positions that carry loss."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Name → [N] float32, one value a position; the same names in the whole run. ``weights`` multiplies each position's
    loss, and may be negative; an objective declares the others that it reads."""
    divisor: float | None = None
    """What this micro-batch adds to the divisor of its step's summed loss; None is the sum of its weights."""
    pairs: int | None = None
    """Pairs of a token and a token that it attends to, itself included, without padding; None: estimated from the mean
    position.
    """
    real: Tensor | None = None
    """[N] bool: which positions are tokens, not padding; None: all. Figures of blocks count only these."""

    @property
    def loss_weight(self) -> float:
        """What this micro-batch adds to the divisor of its step's summed loss."""
        if self.divisor is not None:
            return self.divisor
        weights = self.columns.get(WEIGHTS)
        return float(self.label_tokens) if weights is None else total_weight(weights)

    def counts(self) -> BatchCounts:
        """Its counts, for the ranks that do not run it."""
        pairs = self.pairs
        if pairs is None:
            pairs = round(self.tokens * mean_pairs(self.positions))
        return BatchCounts(
            tokens=self.tokens, label_tokens=self.label_tokens, loss_weight=self.loss_weight, pairs=pairs
        )

    def emptied(self) -> MicroBatch:
        """A micro-batch of the same shapes that trains nothing and counts nothing."""
        import torch

        return replace(
            self,
            labels=torch.full_like(self.labels, IGNORE_LABEL),
            columns={name: torch.zeros_like(column) for name, column in self.columns.items()},
            tokens=0,
            label_tokens=0,
            divisor=0.0,
            pairs=0,
            real=torch.zeros(self.input_ids.shape, dtype=torch.bool),
        )

    def pinned(self) -> MicroBatch:
        """The micro-batch in page-locked memory, from which copies to a GPU are asynchronous."""
        import torch

        values = {f.name: getattr(self, f.name) for f in fields(self)}
        pinned: dict[str, Any] = {k: v.pin_memory() for k, v in values.items() if isinstance(v, torch.Tensor)}
        columns = {name: column.pin_memory() for name, column in self.columns.items()}
        return replace(self, columns=columns, **pinned)


def total_weight(weights_N: Tensor) -> float:
    """Sum of the weights of a micro-batch's positions. All ranks add them in this way, so they get the same bits."""
    return weights_N.double().sum().item()


def mean_pairs(positions_N: Tensor) -> float:
    """Mean number of tokens that a token attends to; positions restart in each document, and padding is a document
    too.
    """
    return float(positions_N.double().mean()) + 1.0
