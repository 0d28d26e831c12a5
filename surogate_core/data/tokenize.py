"""What a dataset format is given and gives back: one row in, tokens and labels out.

Shape suffix: T tokens of one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from surogate_core.data.batch import IGNORE_LABEL

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

TruncationStrategy = Literal["delete", "left", "right", "split"]
"""What becomes of a document that is longer than a row."""


class RowError(ValueError):
    """One row of a data set is unusable; the message is the reason, without the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeContext:
    """What a format may know besides the row. All of it is part of the shard cache's key."""

    tokenizer: PreTrainedTokenizerBase
    sequence_len: int
    """Tokens of a packed row."""
    truncation_strategy: TruncationStrategy = "delete"
    """Applied by the packer after encoding; a format that cuts its parts itself reads it here."""


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

    def __post_init__(self) -> None:
        if self.input_ids.shape != self.labels.shape or self.input_ids.ndim != 1:
            raise ValueError(
                f"input_ids has shape {self.input_ids.shape} and labels {self.labels.shape}: want equal 1-D shapes."
            )

    @classmethod
    def from_mask(cls, input_ids: Sequence[int], trained: Sequence[bool | int] | None = None) -> Encoded:
        """The document whose tokens with a true `trained` carry loss; None trains them all."""
        ids = np.asarray(input_ids, dtype=np.int32)
        if trained is None:
            return cls(input_ids=ids, labels=ids.copy())
        return cls(input_ids=ids, labels=np.where(np.asarray(trained, dtype=bool), ids, IGNORE_LABEL).astype(np.int32))

    @property
    def label_tokens(self) -> int:
        """Tokens that carry loss; the first token is predicted by nothing."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_LABEL))
