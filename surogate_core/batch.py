"""The micro-batch: what the data side hands to the engine.

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

    Labels are already shifted: `labels[t]` is the token that position t predicts, `IGNORE_LABEL`
    where nothing is to be learnt, always so at the last position of a document. Padding is a
    document of its own with no labels.
    """

    input_ids: Tensor
    """[N] int64."""
    labels: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int32, restarting at 0 in each document."""
    cu_seqlens: Tensor
    """[S] int32, the documents' borders in the flattened row: 0, …, N, then N repeated."""
    max_seqlen: int
    """A bound of a document's length that is the same for the whole run (= sequence_len)."""
    tokens: int
    """Tokens that are not padding."""
    label_tokens: int
    """Positions that carry loss."""
    weights: Tensor | None = None
    """[N] float32: what each position counts in the loss; None is 1 for each, in the whole run."""

    pairs: int | None = None
    """Pairs of a token and one that it attends to, itself included, padding aside; None: for each of `tokens` as many
    as the positions say on average."""

    @property
    def loss_weight(self) -> float:
        """Sum of the weights of the positions that carry loss."""
        return float(self.label_tokens) if self.weights is None else self.weights.double().sum().item()

    def pinned(self) -> MicroBatch:
        """The micro-batch in page-locked memory, from which copies to a GPU run beside the host."""
        import torch

        values = {f.name: getattr(self, f.name) for f in fields(self)}
        pinned: dict[str, Any] = {k: v.pin_memory() for k, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(self, **pinned)
