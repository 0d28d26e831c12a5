"""The micro-batch, which the data side passes to the engine.

Shape suffixes: N tokens of a micro-batch (rows × sequence_len, flattened), S document borders.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_LABEL = -100
"""Label of a position that carries no loss."""


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
    weights: Tensor | None = None
    """[N] float32: loss weight of each position; None is 1 for each, in the whole run."""

    pairs: int | None = None
    """Pairs of a token and a token that it attends to, itself included, without padding; None: estimated from the mean
    position.
    """

    @property
    def loss_weight(self) -> float:
        """Sum of the weights of the positions that carry loss."""
        return float(self.label_tokens) if self.weights is None else self.weights.double().sum().item()

    def pinned(self) -> MicroBatch:
        """The micro-batch in page-locked memory, from which copies to a GPU are asynchronous."""
        import torch

        values = {f.name: getattr(self, f.name) for f in fields(self)}
        pinned: dict[str, Any] = {k: v.pin_memory() for k, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(self, **pinned)
