"""The micro-batches of KTO: judged documents, and as many rows of mismatched prompts and answers.

Shape suffix: N tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from surogate_core.plugin import WEIGHTS, ConfigError, Problem, ReferencedTask
from surogate_task_kto.loss import KIND
from surogate_task_kto.rows import KTORows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from surogate_core.plugin import MicroBatch, PackedRows, PreparedData, bundles
    from surogate_task_kto.options import KTOOptions


class KTOTask(ReferencedTask):
    """The rows of judged answers, each epoch in an order of its own.

    With the KL divergence, half of a micro-batch's rows are the mismatched rows of the other half.
    """

    def __init__(self, config: bundles.RunKeys, data: PreparedData, options: KTOOptions):
        self._mismatched = options.loss_type == "kto"
        rows = config.per_device_train_batch_size
        if self._mismatched:
            if rows % 2:
                message = (
                    f"{rows} is odd; half of the rows of a micro-batch have mismatched prompts and answers, for the KL "
                    f"divergence."
                )
                fix = f"per_device_train_batch_size={rows + 1}, or kto_loss_type=apo_zero_unpaired"
                raise ConfigError([Problem(key="per_device_train_batch_size", message=message, fix=fix)])
            config = config.with_keys(per_device_train_batch_size=rows // 2)
        if config.truncation_strategy == "split":
            message = "split makes several documents of one answer, and its parts cannot be judged."
            raise ConfigError([Problem(key="truncation_strategy", message=message, fix="truncation_strategy=delete")])
        held_out = None if data.eval is None else KTORows(data.eval)
        super().__init__(config, replace(data, train=KTORows(data.train), eval=held_out))

    def sample(self) -> MicroBatch:
        """The first row, as often as a micro-batch has rows."""
        return self.unreferenced(self._data.train, self._indices(self._data.train, [0] * self._rows))

    @property
    def _rows(self) -> int:
        return self._config.per_device_train_batch_size

    def _indices(self, rows: PackedRows, indices: Sequence[int | None]) -> Sequence[int | None]:
        return cast("KTORows", rows).with_mismatched(indices) if self._mismatched else indices

    def referenced(self, steps: int) -> list[tuple[PackedRows, NDArray[np.int64]]]:
        """(rows, the numbers of those that a run of `steps` reads), mismatched rows included."""
        found = super().referenced(steps)
        if not self._mismatched:
            return found
        return [(rows, np.concatenate([numbers, numbers + len(rows)])) for rows, numbers in found]

    def make(self, rows: PackedRows, indices: Sequence[int | None]) -> MicroBatch:
        """The micro-batch of packed rows and their mismatched rows."""
        return super().make(rows, self._indices(rows, indices))

    def unreferenced(self, rows: PackedRows, indices: Sequence[int | None]) -> MicroBatch:
        """The micro-batch with the column of kinds. Its divisor is the number of judged documents."""
        batch = super().unreferenced(rows, indices)
        kind_N = torch.from_numpy(np.concatenate([cast("KTORows", rows).kinds(index) for index in indices]))
        columns = {name: column for name, column in batch.columns.items() if name != WEIGHTS}
        documents = int(((batch.positions == 0) & (kind_N.abs() == 1)).sum())
        return replace(batch, columns={**columns, KIND: kind_N}, divisor=float(documents))
