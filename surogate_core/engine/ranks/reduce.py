"""Reduce-scatter in a fixed order: sums over the ranks whose bits are the same in every run.

Shape suffixes: N ranks, K elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from surogate_core.bundles import FLAT_ALIGNMENT
from surogate_core.bundles.fabrics import Fabric
from surogate_core.kernels.sums import add_tree_sum, tree_sum

CHUNK = 2**26
"""Most elements that a rank receives before it adds them."""


Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""(elements, dtype, device) → zeros."""


def plain_zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in torch's own memory."""
    return torch.zeros(elements, dtype=dtype, device=device)


def staging_elements(longest: int, world: int) -> int:
    """Elements of the `staging` of `reduce_parts` for parts of `longest` elements: at most `CHUNK`."""
    return min(longest * world, CHUNK)


def reduce_parts(
    fabric: Fabric, parts: Sequence[Tensor], staging: Tensor, *, out: Tensor | None = None, onto: bool = False
) -> None:
    """Set `out` to the sum of this rank's part over the ranks, in tree order; `out` is that part unless given. `onto`:
    add the sum to `out` instead.

    `parts[r]`, 1-D and contiguous, are this rank's values of what rank r owns; their lengths may differ, and may be 0.
    The own part is overwritten even if `out` is another tensor. `staging`, 1-D, holds what is received. Its length does
    not change the bits.
    """
    out = parts[fabric.rank] if out is None else out
    if fabric.world == 1:
        if onto:
            out.add_(parts[0])
        elif out is not parts[0]:
            out.copy_(parts[0])
        return
    longest = max(parts, key=lambda part: part.numel())
    for start, stop in _chunks(sorted({part.numel() for part in parts}), staging.numel() // fabric.world):
        # Every exchange sends equal lengths. A rank whose part is shorter gets other values, and ignores them.
        sent = [(part if part.numel() >= stop else longest)[start:stop] for part in parts]
        received_NK = staging[: fabric.world * (stop - start)].view(fabric.world, stop - start)
        fabric.exchange(sent, received_NK)
        if parts[fabric.rank].numel() >= stop:
            values = list(received_NK.unbind())
            values[fabric.rank] = parts[fabric.rank][start:stop]
            if onto:
                add_tree_sum(out[start:stop], values)
            else:
                tree_sum(values, out[start:stop])


def _chunks(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover all lengths, each of at most `most` elements and within or outside of each length."""
    step = most - most % FLAT_ALIGNMENT or most
    start = 0
    for length in lengths:
        while start < length:
            assert step, "no room for a value of each rank"
            stop = min(start + step, length)
            yield start, stop
            start = stop
