"""The order in which rows are trained on, as a state that is saved, and rows as micro-batches.

Shape suffixes: N tokens of a micro-batch (rows × sequence_len, flattened), S document borders.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate_core.batch import IGNORE_LABEL, WEIGHTS, BatchCounts, MicroBatch, total_weight
from surogate_core.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from surogate_core.bundles import Steps
    from surogate_core.bundles.handed import RunKeys
    from surogate_core.data.pipeline import PreparedData
    from surogate_core.data.shards import PackedRows, Row

STATE_VERSION = 1

Make = Callable[["PackedRows", Sequence[int | None]], MicroBatch]
"""(rows, their numbers in a micro-batch, None for a row of padding) → the micro-batch; `collate` unless a task adds to
it.
"""


def collate(rows: PackedRows, indices: Sequence[int | None]) -> MicroBatch:
    """The concatenated rows as one micro-batch of host tensors; None is a row of padding only."""
    import torch

    length = rows.sequence_len
    n = len(indices) * length
    input_ids = np.full(n, rows.padding_id, np.int64)
    weights = np.zeros(n, np.float32)
    positions = np.empty(n, np.int32)
    real = np.zeros(n, np.bool_)
    borders = [0]
    tokens = pairs = 0
    for slot, index in enumerate(indices):
        at = slot * length
        if index is not None:
            row = rows.row(index)
            used = len(row.input_ids)
            input_ids[at : at + used] = row.input_ids
            real[at : at + used] = True
            _shift(row, weights[at : at + used])
            tokens += used
            pairs += _pairs(row)
            for document in row.lengths:
                positions[at : at + document] = np.arange(document, dtype=np.int32)
                at += document
                borders.append(at)
        padding = (slot + 1) * length - at
        if padding:
            positions[at : at + padding] = np.arange(padding, dtype=np.int32)
            borders.append(at + padding)
    cu_seqlens = np.full(len(indices) * rows.max_documents + 1, n, np.int32)
    cu_seqlens[: len(borders)] = borders
    labels = np.full(n, IGNORE_LABEL, np.int64)
    labels[:-1][weights[:-1] > 0] = input_ids[1:][weights[:-1] > 0]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=length,
        tokens=tokens,
        pairs=pairs,
        label_tokens=int(np.count_nonzero(weights)),
        columns={WEIGHTS: torch.from_numpy(weights)} if rows.weighted else {},
        real=torch.from_numpy(real),
    )


def count(rows: PackedRows, indices: Sequence[int]) -> BatchCounts:
    """The figures of the micro-batch that `collate` would make of these rows."""
    import torch

    # As long as a micro-batch, because the order in which torch adds depends on the length.
    weights = np.zeros(len(indices) * rows.sequence_len, np.float32)
    tokens = pairs = 0
    for slot, index in enumerate(indices):
        row, at = rows.row(index), slot * rows.sequence_len
        used = len(row.input_ids)
        _shift(row, weights[at : at + used])
        tokens += used
        pairs += _pairs(row)
    label_tokens = int(np.count_nonzero(weights))
    return BatchCounts(
        tokens=tokens,
        label_tokens=label_tokens,
        loss_weight=total_weight(torch.from_numpy(weights)) if rows.weighted else float(label_tokens),
        pairs=pairs,
    )


def _shift(row: Row, weights: NDArray[np.float32]) -> None:
    """Give each token's loss weight to the position before it, which predicts it; a document's last predicts none."""
    weights[:-1] = row.weights[1:]
    weights[np.cumsum(row.lengths, dtype=np.int64) - 1] = 0


def _pairs(row: Row) -> int:
    return sum(document * (document + 1) // 2 for document in row.lengths)


class StepLoader:
    """An endless stream of optimizer steps over epochs, each epoch in an order of its own.

    Rows are taken from one stream, so a step may span two epochs and no row is ever left out. The order depends only on
    the seed, the epoch and the number of rows. The state is the number of rows taken, so it stays valid when the batch
    size changes.
    """

    def __init__(
        self,
        rows: PackedRows,
        *,
        rows_per_micro_batch: int,
        micro_batches: int,
        seed: int,
        make: Make = collate,
        day: str | None = None,
    ):
        """`day`: the date that the rows show, kept in the state."""
        assert len(rows) > 0
        self._day = day
        self._rows, self._make = rows, make
        self._rows_per_micro_batch = rows_per_micro_batch
        self._micro_batches = micro_batches
        self._seed = seed
        self._taken = 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> float:
        """Passes over the rows so far, with a fraction."""
        return self._taken / len(self._rows)

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps in one pass; not a whole number unless the rows divide evenly."""
        return len(self._rows) / (self._rows_per_micro_batch * self._micro_batches)

    def next_step(self) -> list[MicroBatch]:
        """The micro-batches of the next optimizer step."""
        return [self._make(self._rows, self._next_rows()) for _ in range(self._micro_batches)]

    def next_share(self, own: Container[int]) -> list[MicroBatch | BatchCounts]:
        """As `next_step`, with the figures alone of the micro-batches that are not in `own`."""
        return [
            self._make(self._rows, self._next_rows()) if number in own else self._counts(self._next_rows())
            for number in range(self._micro_batches)
        ]

    def _counts(self, indices: Sequence[int]) -> BatchCounts:
        if self._make is collate:
            return count(self._rows, indices)
        return self._make(self._rows, indices).counts()

    def state(self) -> dict[str, Any]:
        """The position in the stream, as JSON values."""
        return {
            "version": STATE_VERSION,
            "rows_taken": self._taken,
            "rows": len(self._rows),
            "digest": self._rows.digest,
            "seed": self._seed,
            **({"day": self._day} if self._day else {}),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises `UserError` when the rows or their order are others."""
        mine = self.state()
        changed = [key for key in ("version", "rows", "digest", "seed") if state.get(key) != mine[key]]
        if changed:
            raise UserError(
                f"The checkpoint was made with other training rows or another order of them "
                f"({', '.join(f'{key} {_short(state.get(key))}, now {_short(mine[key])}' for key in changed)}): "
                f"its position in the data cannot be restored. Fix: restore `datasets`, the tokenizer, `sequence_len`, "
                f"packing and `train_seed` to what they were, or start anew with resume_from_checkpoint=false."
            )
        self._taken = int(state["rows_taken"])

    def _next_rows(self) -> list[int]:
        return [self._next_row() for _ in range(self._rows_per_micro_batch)]

    def first(self, steps: int) -> NDArray[np.int64]:
        """The rows of the first steps of a run, ascending, each once."""
        taken = steps * self._rows_per_micro_batch * self._micro_batches
        if taken >= len(self._rows):
            return np.arange(len(self._rows), dtype=np.int64)
        return np.sort(epoch_order(len(self._rows), self._seed, 0)[:taken])

    def _next_row(self) -> int:
        epoch, place = divmod(self._taken, len(self._rows))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(len(self._rows), self._seed, epoch))
        self._taken += 1
        return int(self._order[1][place])


def epoch_order(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The permutation of row indices of one epoch, int64."""
    # RandomState's streams are frozen by NumPy's policy (NEP 19), Generator's are not: a resumed
    # run must see the same order after an upgrade.
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))
    return random.permutation(rows).astype(np.int64, copy=False)


class EvalBatches:
    """Every row once, in order; the last micro-batch is filled up with rows of padding."""

    def __init__(self, rows: PackedRows, *, rows_per_micro_batch: int, make: Make = collate):
        self._rows, self._make = rows, make
        self._rows_per_micro_batch = rows_per_micro_batch

    def __len__(self) -> int:
        """Micro-batches in one pass."""
        return -(-len(self._rows) // self._rows_per_micro_batch)

    def __iter__(self) -> Iterator[MicroBatch]:
        for first in range(0, len(self._rows), self._rows_per_micro_batch):
            indices: list[int | None] = list(range(first, min(first + self._rows_per_micro_batch, len(self._rows))))
            indices += [None] * (self._rows_per_micro_batch - len(indices))
            yield self._make(self._rows, indices)


class PackedTask:
    """The core's tasks: the packed rows of the data sets, each epoch in an order of its own."""

    def __init__(self, config: RunKeys, data: PreparedData):
        self._config, self._data = config, data

    def make(self, rows: PackedRows, indices: Sequence[int | None]) -> MicroBatch:
        """A micro-batch of these rows. A task that gives its objective columns or another divisor overrides it."""
        return collate(rows, indices)

    def sample(self) -> MicroBatch:
        """The first row, as often as a micro-batch has rows."""
        return self.make(self._data.train, [0] * self._config.per_device_train_batch_size)

    def steps(self) -> Steps:
        """The training rows, from the beginning."""
        return self.loader()

    def loader(self) -> StepLoader:
        """The same, for a task that asks for the rows of the steps to come."""
        return StepLoader(
            self._data.train,
            rows_per_micro_batch=self._config.per_device_train_batch_size,
            micro_batches=self._config.gradient_accumulation_steps,
            seed=self._config.train_seed,
            make=self._make,
            day=self._data.day,
        )

    def evaluation(self) -> EvalBatches | None:
        """The held-out rows; None when nothing is held out."""
        if self._data.eval is None:
            return None
        size = self._config.per_device_train_batch_size
        return EvalBatches(self._data.eval, rows_per_micro_batch=size, make=self._make)

    @property
    def _make(self) -> Make:
        """`collate` itself unless `make` is overridden, because its figures are counted without a micro-batch."""
        return collate if type(self).make is PackedTask.make else self.make


def _short(value: Any) -> str:
    return str(value)[:12]
