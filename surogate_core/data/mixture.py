"""Chooses the documents of an epoch: those that are not held out, each data set as often as its weight says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def split_documents(count: int, ratio: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(kept, held out) indices of `count` documents, both ascending; at least one on each side if `ratio` > 0."""
    if ratio == 0 or count < 2:
        return np.arange(count, dtype=np.int64), np.empty(0, np.int64)
    out = min(max(1, round(count * ratio)), count - 1)
    order = _permutation(count, seed)
    return np.sort(order[out:]), np.sort(order[:out])


def count_copies(digests: NDArray[np.uint64]) -> int:
    """Number of documents with the digest of an earlier document."""
    ordered = np.sort(digests)
    return int(np.count_nonzero(ordered[1:] == ordered[:-1]))


def keep_copies_together(
    kept: NDArray[np.int64], out: NDArray[np.int64], digests: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A split with all copies of a document on one side; copies have equal `digests`. Other documents do not change
    sides.

    Copies follow the first copy, except that copies that fill more than half of the held-out part are trained. If
    nothing is then held out, the smallest set of copies of a held-out document is held out; if all documents are equal,
    nothing is. There must be copies, and `out` must not be empty.
    """
    values, counts = np.unique(digests, return_counts=True)
    held = np.zeros(len(digests), bool)
    held[out] = True
    copies = np.flatnonzero(np.isin(digests, values[counts > 1]))
    _, first, group, sizes = np.unique(digests[copies], return_index=True, return_inverse=True, return_counts=True)
    touched = np.bincount(group, weights=held[copies]) > 0
    follows = held[copies[first]] & (2 * sizes <= len(out))
    held[copies] = follows[group]
    if not held.any():
        held[copies] = group == np.argmin(np.where(touched, sizes, len(digests) + 1))
    if held.all():
        held[copies] = group != np.argmax(sizes)
    return np.flatnonzero(~held), np.flatnonzero(held)


def mix(
    documents: NDArray[np.int64], sizes: Sequence[int], weights: Sequence[float], seed: int
) -> list[NDArray[np.int64]]:
    """The passes of an epoch: ascending indices of documents, none twice in a pass.

    `documents` are the ascending indices to choose from; data set i has the next `sizes[i]` indices
    and is taken `weights[i]` times: whole in as many passes, and its fraction, drawn by `seed` and
    rounded to at least one document, in one more.
    """
    borders = np.searchsorted(documents, np.cumsum([0, *sizes]))
    passes: list[list[NDArray[np.int64]]] = [[] for _ in range(int(np.ceil(max(weights))))]
    for index, weight in enumerate(weights):
        mine = documents[borders[index] : borders[index + 1]]
        whole = int(weight)
        for number in range(whole):
            passes[number].append(mine)
        part = max(round((weight - whole) * len(mine)), 1 if whole == 0 else 0)
        if part and len(mine):
            passes[whole].append(np.sort(mine[_permutation(len(mine), seed, index)[:part]]))
    return [np.concatenate(parts) for parts in passes if parts]


def _permutation(count: int, *seed: int) -> NDArray[np.int64]:
    # RandomState's streams are frozen by NumPy's policy (NEP 19): a resumed run must draw the same.
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(list(seed))))
    return random.permutation(count).astype(np.int64, copy=False)
