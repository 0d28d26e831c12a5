"""The micro-batches of a distillation: those of the packed rows, with the teacher's tokens in columns.

Shape suffixes: N tokens of a micro-batch, M trained tokens, K tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache as cached
from typing import TYPE_CHECKING

import numpy as np
import torch

from surogate_core.plugin import (
    IGNORE_LABEL,
    ConfigError,
    PackedTask,
    Problem,
    cache_root,
    encoding,
    events,
    most_steps,
    second_model,
)
from surogate_task_distill import teacher
from surogate_task_distill.loss import id_columns, logprob_columns
from surogate_task_distill.store import TeacherStore, Wanted, computed

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from surogate_core.plugin import MicroBatch, PackedRows, PreparedData, bundles
    from surogate_task_distill.options import DistillOptions
    from surogate_task_distill.store import Forward

PASS_TOKENS = 4096
"""Tokens that the teacher reads at a time, unless a row is longer."""


class DistillTask(PackedTask):
    """The packed rows of the data sets, each epoch in an order of its own, with the teacher's tokens."""

    def __init__(self, config: bundles.RunKeys, data: PreparedData, options: DistillOptions):
        super().__init__(config, data)
        self._options = options
        self._train: TeacherStore | None = None
        self._eval: TeacherStore | None = None

    def sample(self) -> MicroBatch:
        """The first row, as often as a micro-batch has rows, with zeros for the teacher."""
        indices = [0] * self._config.per_device_train_batch_size
        return self._with_columns(super().make(self._data.train, indices), indices, None)

    def prepare(self, context: bundles.PrepareContext) -> None:
        """Compute what the cache lacks of the teacher's tokens; the teacher is loaded only if something is missing."""
        options, word, train, held_out = self._options, self._options.teacher, self._data.train, self._data.eval
        assert word is not None
        opened = teacher.open_teacher(word, context.config, context.registry)
        vocabulary = teacher.check_tokenizer(context.tokenizer, opened.tokenizer, word=word)
        teacher.check_context(opened, max(rows.longest for rows in (train, held_out) if rows is not None), word=word)
        if options.top_k >= vocabulary:
            raise _refused("distill_top_k", f"the vocabulary has {vocabulary:,} tokens.", fix="distill_top_k=32")
        wanted = Wanted(
            teacher=second_model.digest(opened),
            top_k=options.top_k,
            temperature=options.temperature,
            vocabulary=vocabulary,
        )
        load = cached(lambda: teacher.forward_of(opened, context.registry, context.show))
        steps = self.loader()
        self._train = self._store(
            train, steps.first(most_steps(context.config, steps)), wanted, load, context, "training"
        )
        if held_out is not None:
            self._eval = self._store(held_out, np.arange(len(held_out)), wanted, load, context, "held-out")

    def _store(
        self,
        rows: PackedRows,
        indices: NDArray[np.int64],
        wanted: Wanted,
        load: Callable[[], Forward],
        context: bundles.PrepareContext,
        which: str,
    ) -> TeacherStore:
        return computed(
            rows,
            indices.tolist(),
            wanted,
            encoding.DataCache(cache_root(context.config.data_cache_dir), "teachers"),
            load=load,
            rows_per_pass=max(1, PASS_TOKENS // rows.sequence_len),
            progress=lambda done, total: context.show(
                events.Progress(task=f"the teacher reads the {which} rows", done=done, total=total, unit="rows")
            ),
        )

    def make(self, rows: PackedRows, indices: Sequence[int | None]) -> MicroBatch:
        """The micro-batch with the teacher's columns, 0 where nothing is trained and before `prepare`."""
        store = self._train if rows is self._data.train else self._eval
        return self._with_columns(super().make(rows, indices), indices, store)

    def _with_columns(self, batch: MicroBatch, indices: Sequence[int | None], store: TeacherStore | None) -> MicroBatch:
        columns = teacher_columns(batch, indices, store, self._data.train.sequence_len, self._options.top_k)
        return replace(batch, columns={**batch.columns, **columns})


def teacher_columns(
    batch: MicroBatch, indices: Sequence[int | None], store: TeacherStore | None, length: int, top_k: int
) -> dict[str, Tensor]:
    """The columns of the teacher's tokens and log-probabilities, in rows of `length` tokens."""
    values = np.zeros((2 * top_k, len(batch.labels)), np.float32)
    for slot, index in enumerate(indices):
        if index is None or store is None:
            continue
        labels = batch.labels[slot * length : (slot + 1) * length].numpy()
        trained = slot * length + np.flatnonzero(labels != IGNORE_LABEL)
        ids_MK, logprobs_MK = store.row(index)
        values[:top_k, trained] = ids_MK.T
        values[top_k:, trained] = logprobs_MK.T
    return dict(zip((*id_columns(top_k), *logprob_columns(top_k)), torch.from_numpy(values), strict=True))


def _refused(key: str, message: str, *, fix: str) -> ConfigError:
    return ConfigError([Problem(key=key, message=message, fix=fix)])
