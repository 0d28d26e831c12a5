"""The micro-batches of a reward model: pairs of documents, with a label at the last token of each.

Shape suffix: N tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from surogate_core.plugin import IGNORE_LABEL, WEIGHTS, PackedTask
from surogate_task_reward.loss import PREFERRED

if TYPE_CHECKING:
    from surogate_core.plugin import MicroBatch, PackedRows


class RewardTask(PackedTask):
    """The rows of pairs, each epoch in an order of its own."""

    def make(self, rows: PackedRows, indices: Sequence[int | None]) -> MicroBatch:
        """The micro-batch with the column `preferred`. Its divisor is the number of pairs."""
        batch, length = super().make(rows, indices), rows.sequence_len
        preferred_N = np.zeros(len(batch.labels), np.float32)
        labels_N = np.full(len(batch.labels), IGNORE_LABEL, np.int64)
        for slot, index in enumerate(indices):
            at = slot * length
            for number, tokens in enumerate(() if index is None else rows.row(index).lengths):
                preferred_N[at : at + tokens] = 1 - 2 * (number % 2)
                at += tokens
                labels_N[at - 1] = 0
        documents = int((labels_N != IGNORE_LABEL).sum())
        columns = {name: column for name, column in batch.columns.items() if name != WEIGHTS}
        return replace(
            batch,
            labels=torch.from_numpy(labels_N),
            label_tokens=documents,
            columns={**columns, PREFERRED: torch.from_numpy(preferred_N)},
            divisor=documents / 2,
        )
