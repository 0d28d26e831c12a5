"""The rows of a KTO run: the packed rows, and for each a row of mismatched prompts and answers.

The mismatched documents of a row pair each prompt with the answer of the document before it, so they take as many
tokens as the row itself. A row with a single document gets the answer of the next such row, cut where the row ends.
Both depend on the packed rows alone: a row has the same mismatched row in every epoch, and the log-probabilities of the
reference can be computed once.

Shape suffix: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from surogate_core.plugin import PackedRows, Row
from surogate_task_kto import loss, unpaired

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Judged(NamedTuple):
    """A document, cut where its answer begins."""

    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]
    weights: NDArray[np.float32]
    """The loss weight of each token of the answer."""


def judged(row: Row) -> Iterator[Judged]:
    """The documents of a row."""
    for start, end in pairwise(np.cumsum([0, *row.lengths]).tolist()):
        ids, weights = row.input_ids[start:end], row.weights[start:end]
        first = int(np.argmax(weights > 0))
        yield Judged(ids[:first], ids[first:], weights[first:])


class KTORows(PackedRows):
    """Packed rows. `row` also gives the mismatched row of row i, as row R + i."""

    def __init__(self, rows: PackedRows):
        vars(self).update(vars(rows))
        alone = [index for index in range(len(rows)) if len(rows.row(index).lengths) == 1]
        self._next_alone = dict(zip(alone, [*alone[1:], *alone[:1]], strict=True)) if len(alone) > 1 else {}

    def row(self, index: int) -> Row:
        """Row `index`."""
        return super().row(index) if index < len(self) else self._mismatched(index - len(self))

    def _mismatched(self, index: int) -> Row:
        documents = list(judged(self.row(index)))
        answers = [*documents[-1:], *documents[:-1]]  # the order of TRL
        if len(documents) == 1:
            if index not in self._next_alone:
                return Row(input_ids=np.empty(0, np.int32), weights=np.empty(0, np.float32), lengths=())
            answers = list(judged(self.row(self._next_alone[index])))
        ids, weights, lengths, room = [], [], [], self.sequence_len
        for document, other in zip(documents, answers, strict=True):
            whole = np.concatenate([document.prompt, other.answer])[:room]
            ids.append(whole)
            weights.append(np.concatenate([np.zeros(len(document.prompt), np.float32), other.weights])[:room])
            lengths.append(len(whole))
            room -= len(whole)
        return Row(input_ids=np.concatenate(ids), weights=np.concatenate(weights), lengths=tuple(lengths))

    def with_mismatched(self, indices: Sequence[int | None]) -> list[int | None]:
        """Each row followed by its mismatched row."""
        return [one for row in indices for one in (row, None if row is None else row + len(self))]

    def kinds(self, index: int | None) -> NDArray[np.float32]:
        """[T]: the kind of the document of each token of a row, 0 in its padding."""
        found = np.zeros(self.sequence_len, np.float32)
        if index is None:
            return found
        row, at = self.row(index), 0
        for document, length in zip(judged(row), row.lengths, strict=True):
            if index >= len(self):
                kind = loss.MISMATCHED
            else:
                kind = loss.GOOD if document.weights[0] == unpaired.GOOD else loss.BAD
            found[at : at + length] = kind
            at += length
        return found
