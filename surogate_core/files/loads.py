"""The tokens of each expert over the steps of a run, in columns whose number is bounded.

Shape suffixes: L layers with experts, E experts of a layer, T columns.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

COLUMNS = 256
"""Most columns that are kept; beyond them neighbours are joined, until half as many are left."""

SHOWN = 128
"""Most columns of a heat map."""

CELLS = 400_000
"""Cells of all heat maps of a page; a model with many experts has fewer columns, at least `FEWEST`."""
FEWEST = 32


@dataclass(frozen=True, slots=True)
class Column:
    """Some steps: their numbers from `first` to `last`, and the tokens of each expert in them."""

    first: int
    last: int
    tokens_LE: NDArray[np.int64]


class Loads:
    """The loads that a run has recorded. One thread may add while others read."""

    def __init__(self) -> None:
        self.layers: tuple[int, ...] = ()
        self.columns: tuple[Column, ...] = ()

    def add(self, record: Mapping[str, Any]) -> None:
        """Take an ``expert_loads``. One that is damaged, or of another model, is left out."""
        try:
            layers = tuple(int(layer) for layer in record["layers"])
            tokens_LE = np.array(record["tokens"], np.int64)
            last, steps = int(record["step"]), int(record["steps"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        if tokens_LE.ndim != 2 or len(tokens_LE) != len(layers) or not tokens_LE.size:
            return
        self.drop_after(last - steps)
        if self.columns and (layers != self.layers or tokens_LE.shape != self.columns[0].tokens_LE.shape):
            return
        columns = (*self.columns, Column(last - steps + 1, last, tokens_LE))
        self.layers, self.columns = layers, columns if len(columns) <= COLUMNS else _joined(columns, COLUMNS // 2)

    def drop_after(self, step: int) -> None:
        """Drop the columns that have later steps."""
        if self.columns and self.columns[-1].last > step:
            self.columns = tuple(column for column in self.columns if column.last <= step)

    def shown(self) -> tuple[Column, ...]:
        """The columns of a heat map."""
        columns = self.columns
        if not columns:
            return ()
        limit = min(SHOWN, max(FEWEST, CELLS // columns[0].tokens_LE.size))
        return _joined(columns, limit)

    def data(self) -> dict[str, Any] | None:
        """What the script draws; None without a record.

        `cells` is [L, E, T] as base64, a byte each: 0 for no token, otherwise 128 + 127 · log2(load) / `span`, where a
        load of 1 is the mean of the layer's experts.
        """
        columns = self.shown()
        if not columns:
            return None
        loads_LET = loads(columns)
        span = max(3, math.ceil(math.log2(max(float(loads_LET.max()), 1.0))))
        with np.errstate(divide="ignore"):
            heights = 128 + 127 * np.log2(loads_LET) / span
        cells = np.where(loads_LET > 0, np.clip(np.nan_to_num(heights.round()), 1, 255), 0).astype(np.uint8)
        return {
            "layers": list(self.layers),
            "experts": cells.shape[1],
            "bounds": [[column.first, column.last] for column in columns],
            "span": span,
            "cells": base64.b64encode(cells.tobytes()).decode(),
        }

    def rows(self) -> list[tuple[str, ...]]:
        """(layer, imbalance, highest imbalance with its steps, busiest expert, experts without a token) over all."""
        columns = self.columns
        if not columns:
            return []
        total_LE = sum_of(columns)
        mean_L = np.maximum(total_LE.mean(1), 1e-9)
        peaks_LT = loads(columns).max(1)
        found: list[tuple[str, ...]] = []
        for place, layer in enumerate(self.layers):
            worst = int(peaks_LT[place].argmax())
            busiest = int(total_LE[place].argmax())
            steps = _steps(columns[worst])
            found.append(
                (
                    str(layer),
                    f"{total_LE[place, busiest] / mean_L[place]:.2f}",
                    f"{peaks_LT[place, worst]:.2f} ({steps})",
                    str(busiest),
                    str(int((total_LE[place] == 0).sum())),
                )
            )
        return found


def sum_of(columns: Sequence[Column]) -> NDArray[np.int64]:
    """[L, E]: tokens of each expert in all of them."""
    found: NDArray[np.int64] = np.sum([column.tokens_LE for column in columns], axis=0)
    return found


def loads(columns: Sequence[Column]) -> NDArray[np.float64]:
    """[L, E, T]: tokens of each expert divided by the mean of its layer's experts."""
    tokens_LET = np.stack([column.tokens_LE for column in columns], axis=-1).astype(np.float64)
    found: NDArray[np.float64] = tokens_LET / np.maximum(tokens_LET.mean(1, keepdims=True), 1e-9)
    return found


def _joined(columns: Sequence[Column], count: int) -> tuple[Column, ...]:
    """At most `count` columns, of neighbours that are joined."""
    if len(columns) <= count:
        return tuple(columns)
    borders = [place * len(columns) // count for place in range(count + 1)]
    parts = (columns[begin:end] for begin, end in pairwise(borders))
    return tuple(Column(part[0].first, part[-1].last, sum_of(part)) for part in parts)


def _steps(column: Column) -> str:
    return f"step {column.last:,}" if column.first == column.last else f"steps {column.first:,} to {column.last:,}"
