"""Packed rows with the log-probabilities that the model gave to their tokens before the first step.

Shape suffixes: R rows, L sequence_len, N tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from surogate_core.data.sampler import PackedTask

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from surogate_core.batch import MicroBatch
    from surogate_core.data.shards import PackedRows

REFERENCE = "reference_logprobs"
"""The column of the log-probabilities of the labels under the reference."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class References:
    """The log-probabilities of some of the packed rows."""

    rows_R: NDArray[np.int64]
    """The rows' numbers, ascending."""
    logprobs_RL: NDArray[np.float32]
    """The log-probability of the label at each position; 0 where there is no label."""

    def row(self, index: int) -> NDArray[np.float32]:
        """[L] of a row. Raises `KeyError` if it was not computed."""
        place = int(np.searchsorted(self.rows_R, index))
        if place == len(self.rows_R) or self.rows_R[place] != index:
            raise KeyError(f"row {index} has no reference log-probabilities")
        values: NDArray[np.float32] = self.logprobs_RL[place]
        return values


class ReferencedTask(PackedTask):
    """A task whose objective reads the column `reference_logprobs`; its micro-batches have it.

    The run computes the values with the model before the first step (`run/reference.py`) and gives them to `refer`.
    """

    _train: References | None = None
    _eval: References | None = None

    def referenced(self, steps: int) -> list[tuple[PackedRows, NDArray[np.int64]]]:
        """(rows, the numbers of those that a run of `steps` reads): the training rows, and the held-out rows if there
        are any.
        """
        found = [(self._data.train, self.loader().first(steps))]
        if self._data.eval is not None:
            found.append((self._data.eval, np.arange(len(self._data.eval), dtype=np.int64)))
        return found

    def refer(self, found: Sequence[References]) -> None:
        """Use the log-probabilities of the rows that `referenced` names."""
        self._train = found[0]
        self._eval = found[1] if len(found) > 1 else None

    def sample(self) -> MicroBatch:
        """The first row, as often as a micro-batch has rows."""
        return self.unreferenced(self._data.train, [0] * self._config.per_device_train_batch_size)

    def make(self, rows: PackedRows, indices: Sequence[int | None]) -> MicroBatch:
        """The micro-batch with the column."""
        batch, length = self.unreferenced(rows, indices), rows.sequence_len
        known = self._train if rows is self._data.train else self._eval
        assert known is not None, "the run did not give the reference log-probabilities"
        values_N = batch.columns[REFERENCE].numpy()
        for slot, index in enumerate(indices):
            if index is not None:
                values_N[slot * length : (slot + 1) * length] = known.row(index)
        return batch

    def unreferenced(self, rows: PackedRows, indices: Sequence[int | None]) -> MicroBatch:
        """The micro-batch before its log-probabilities are known, with zeros in their place. A task that adds other
        columns overrides it instead of `make`.
        """
        import torch

        batch = super().make(rows, indices)
        return replace(batch, columns={**batch.columns, REFERENCE: torch.zeros(len(batch.labels))})
