"""Masks of the tokens that rows may choose, from the constraints of their completions.

Shape suffixes: N rows, V vocabulary, W words of 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from surogate_core.generate.sequences import Running


def words_of(size: int) -> int:
    """W for a vocabulary."""
    return -(-size // 32)


def packed_masks(running: Sequence[Running], size: int) -> Tensor | None:
    """[N, W] int32 on the CPU: a bit for each token, and all bits of a row without a constraint. None without any."""
    if all(sequence.constraint is None for sequence in running):
        return None
    words = words_of(size)
    masks = np.full((len(running), words), -1, np.int32)
    for row_W, sequence in zip(masks, running, strict=True):
        if sequence.constraint is not None:
            found = np.frombuffer(sequence.constraint.mask()[: words * 4], np.uint8)
            bits_V = np.zeros(words * 4, np.uint8)
            bits_V[: len(found)] = found
            row_W[:] = bits_V.view("<i4")
    return torch.from_numpy(masks)


def unpacked(masks_NW: Tensor, size: int) -> Tensor:
    """[N, V] bool."""
    tokens_V = torch.arange(size, device=masks_NW.device)
    return (masks_NW[:, tokens_V >> 5] >> (tokens_V & 31)) & 1 > 0
