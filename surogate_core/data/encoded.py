"""The input and the output of a data set format: one row in, tokens and labels out.

Shape suffix: T tokens of one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from surogate_core.batch import IGNORE_LABEL

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

TruncationStrategy = Literal["delete", "left", "right", "split"]
"""How a document that is longer than a row is shortened or dropped."""

LossScale = Literal["default", "last_round", "all"]
"""Which tokens of a conversation are trained: every assistant turn, those after the last user turn, every token."""


class RowError(ValueError):
    """One row of a data set is unusable; the message is the reason, without the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeContext:
    """What a format may read besides the row. All of it is part of the shard cache's key."""

    tokenizer: PreTrainedTokenizerBase
    """The run's tokenizer, with its chat template."""
    sequence_len: int
    """Tokens of a packed row."""
    truncation_strategy: TruncationStrategy = "delete"
    """The packer applies it after encoding; a format that cuts documents itself may read it here."""
    system: str | None = None
    """The system prompt of conversations that have none."""
    use_chat_template: bool = True
    """False: rows are plain text, even if the tokenizer has a chat template."""
    max_length: int | None = None
    """Tokens of the longest document, at most `sequence_len`; None is `sequence_len`. The packer applies it."""
    loss_scale: LossScale = "default"
    """Which tokens of a conversation are trained, unless its messages decide."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """One document.

    Labels are not shifted: `labels[i] == input_ids[i]` where token i is trained (predicted from
    the tokens before it), `IGNORE_LABEL` elsewhere.
    """

    input_ids: NDArray[np.int32]
    """[T] int32."""
    labels: NDArray[np.int32]
    """[T] int32."""
    weights: NDArray[np.float32] | None = None
    """[T] float32: loss weight of each token, 0 if it is not trained; None is 1 for each trained token."""

    def __post_init__(self) -> None:
        for name in ("input_ids", "labels"):
            value = getattr(self, name)
            if not isinstance(value, np.ndarray):
                raise TypeError(f"{name} is {type(value).__name__}, not a NumPy array of int32.")
        if self.input_ids.shape != self.labels.shape or self.input_ids.ndim != 1:
            raise ValueError(
                f"input_ids has shape {self.input_ids.shape} and labels {self.labels.shape}: want equal 1-D shapes."
            )
        if self.weights is None:
            return
        if self.weights.shape != self.labels.shape:
            raise ValueError(f"weights has shape {self.weights.shape} and labels {self.labels.shape}: want equal ones.")
        if not np.all(np.isfinite(self.weights)) or np.any(self.weights < 0):
            raise ValueError("weights has a value that is negative or not finite.")
        if np.any((self.weights == 0) != (self.labels == IGNORE_LABEL)):
            raise ValueError("weights must be 0 where labels is IGNORE_LABEL, and nowhere else.")

    @classmethod
    def from_mask(
        cls,
        input_ids: Sequence[int] | NDArray[np.integer],
        trained: Sequence[bool | int] | NDArray[np.bool_] | None = None,
        weights: Sequence[float] | NDArray[np.floating] | None = None,
    ) -> Encoded:
        """Make a document whose tokens with a true `trained` carry loss; None trains them all.

        A token of weight 0 carries none; the weights of tokens that carry none are set to 0, and
        weights that are all 1 become None.
        """
        ids = np.asarray(input_ids, dtype=np.int32)
        mask = np.ones(ids.shape, bool) if trained is None else np.asarray(trained, dtype=bool)
        loss_weights: NDArray[np.float32] | None = None
        if weights is not None:
            loss_weights = np.where(mask, np.asarray(weights, dtype=np.float32), np.float32(0))
            mask = loss_weights != 0
            if np.all(loss_weights[mask] == 1):
                loss_weights = None
        labels = np.where(mask, ids, np.int32(IGNORE_LABEL)).astype(np.int32, copy=False)
        return cls(input_ids=ids, labels=labels, weights=loss_weights)

    @property
    def label_tokens(self) -> int:
        """Number of tokens that carry loss; the first token never does, because nothing predicts it."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_LABEL))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Documents of one row of a data set that a loss compares, such as a chosen and a rejected answer.

    The packer keeps them in one row, one after the other, each with positions from 0.
    """

    documents: tuple[Encoded, ...]

    def __post_init__(self) -> None:
        if len(self.documents) < 2 or not all(isinstance(document, Encoded) for document in self.documents):
            raise ValueError("a group needs two `Encoded` or more")


def members(encoded: Encoded | Group) -> tuple[Encoded, ...]:
    """The documents of a row."""
    return encoded.documents if isinstance(encoded, Group) else (encoded,)
