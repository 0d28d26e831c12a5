"""Completions as micro-batches.

Shape suffixes: N tokens of a micro-batch (rows × sequence_len, flattened), T tokens of a document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surogate_core.plugin import IGNORE_LABEL, MicroBatch

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One sequence to train on."""

    ids_T: NDArray[np.int64]
    trained_T: NDArray[np.bool_]
    """Whether the model sampled the token; the first is never one of these."""
    columns: Mapping[str, Values] = field(default_factory=dict)
    """Name → a value of each token, [T]."""

    def __len__(self) -> int:
        return len(self.ids_T)

    def with_column(self, name: str, value: float) -> Document:
        """The document with a column of one value."""
        return replace(self, columns={**self.columns, name: np.full(len(self), value, np.float32)})


@dataclass(slots=True, kw_only=True)
class Batch:
    """What the optimizer steps of one generation train on."""

    documents: list[Document]
    completions: int
    """Completions that count in the loss's mean."""
    iterations: int = 0
    """Steps that were taken on it."""

    def state(self) -> dict[str, Any]:
        """The batch as JSON values; floats keep their bits."""
        return {
            "documents": [
                {
                    "ids": document.ids_T.tolist(),
                    "trained": document.trained_T.tolist(),
                    "columns": {name: values.tolist() for name, values in document.columns.items()},
                }
                for document in self.documents
            ],
            "completions": self.completions,
            "iterations": self.iterations,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Batch:
        """The batch whose state this is."""
        documents = [
            Document(
                ids_T=np.array(document["ids"], np.int64),
                trained_T=np.array(document["trained"], np.bool_),
                columns={name: np.array(values, np.float32) for name, values in document["columns"].items()},
            )
            for document in state["documents"]
        ]
        return cls(documents=documents, completions=state["completions"], iterations=state["iterations"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of every micro-batch of a run."""

    rows: int
    sequence_len: int
    documents: int
    """Most documents of a row, besides its padding."""
    columns: tuple[str, ...]
    padding_id: int

    @property
    def borders(self) -> int:
        """Length of `MicroBatch.cu_seqlens`."""
        return self.rows * (self.documents + 1) + 1


def first_fit(lengths: Sequence[int], *, room: int, most: int) -> list[list[int]]:
    """Rows of at most `room` tokens and `most` documents: each document goes into the first row that has room."""
    rows: list[list[int]] = []
    left: list[int] = []
    for place, length in enumerate(lengths):
        assert length <= room
        row = next((r for r, free in enumerate(left) if free >= length and len(rows[r]) < most), None)
        if row is None:
            row = len(rows)
            rows.append([])
            left.append(room)
        rows[row].append(place)
        left[row] -= length
    return rows


def arranged(lengths: Sequence[int], shape: Shape) -> list[list[list[int]]]:
    """The micro-batches of a step: each is rows of documents, by number. A step has at least one."""
    rows = first_fit(lengths, room=shape.sequence_len, most=shape.documents)
    return [rows[first : first + shape.rows] for first in range(0, len(rows), shape.rows)] or [[]]


def micro_batch(rows: Sequence[Sequence[Document]], shape: Shape, *, divisor: float) -> MicroBatch:
    """Rows of documents as one micro-batch; rows that are missing are padding."""
    import torch

    n = shape.rows * shape.sequence_len
    input_ids, labels = np.full(n, shape.padding_id, np.int64), np.full(n, IGNORE_LABEL, np.int64)
    positions, real = np.empty(n, np.int32), np.zeros(n, np.bool_)
    columns = {name: np.zeros(n, np.float32) for name in shape.columns}
    borders, pairs = [0], 0
    for number, row in enumerate([*rows, *([()] * (shape.rows - len(rows)))]):
        at = number * shape.sequence_len
        for document in row:
            end = at + len(document)
            input_ids[at:end], real[at:end] = document.ids_T, True
            positions[at:end] = np.arange(len(document), dtype=np.int32)
            # A position carries what belongs to the token that it predicts.
            trained = document.trained_T[1:]
            labels[at : end - 1][trained] = document.ids_T[1:][trained]
            for name, values in document.columns.items():
                columns[name][at : end - 1] = np.where(trained, values[1:], 0.0)
            pairs += len(document) * (len(document) + 1) // 2
            borders.append(end)
            at = end
        padding = (number + 1) * shape.sequence_len - at
        if padding:
            positions[at : at + padding] = np.arange(padding, dtype=np.int32)
            borders.append(at + padding)
    cu_seqlens = np.full(shape.borders, n, np.int32)
    cu_seqlens[: len(borders)] = borders
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=shape.sequence_len,
        tokens=int(real.sum()),
        label_tokens=int((labels != IGNORE_LABEL).sum()),
        columns={name: torch.from_numpy(values) for name, values in columns.items()},
        divisor=divisor,
        pairs=pairs,
        real=torch.from_numpy(real),
    )
