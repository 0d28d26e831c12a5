"""How the programs of scans cut their work: rows of a chunk, features at a time, warps and stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from surogate_native.adapters import large


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanTile:
    """How many features of a value a program reads at a time."""

    f: int
    """If a value has fewer features, the other columns are zeros: ptxas 12.8, which Triton 3.6 has, makes code of some
    programs for Hopper that reads registers which nothing has written, mostly where columns are few.
    """
    warps: int
    stages: int
    e: int = 64
    """Features of a key at a time, where a program has a part of them: `keys`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanTiles:
    """Rows of a chunk, and the tile of each kind of program. Fixed: equal inputs must give equal bits on every run."""

    chunk: int
    system: ScanTile
    """It makes the delta rule's system of a chunk, and multiplies by its inverse."""
    local: ScanTile
    """It computes outputs, and the delta rule's gradients of new values from outputs of the same chunk."""
    carried: ScanTile
    """It carries states or their gradients."""
    values: ScanTile
    """It computes the gradients of values, decays and rates."""
    keys: ScanTile
    """It computes the gradients of queries and keys, and what they say of decays and rates."""


WIDE = ScanTiles(
    chunk=32,
    system=ScanTile(f=32, warps=4, stages=1),
    local=ScanTile(f=32, warps=4, stages=1),
    carried=ScanTile(f=16, warps=4, stages=1),
    values=ScanTile(f=16, warps=4, stages=1),
    keys=ScanTile(f=16, warps=4, stages=1),
)
"""In fp32, which is multiplied without tensor cores."""
SMALL = ScanTiles(
    chunk=64,
    system=ScanTile(f=64, warps=4, stages=1),
    local=ScanTile(f=64, warps=4, stages=1),
    carried=ScanTile(f=32, warps=4, stages=2),
    values=ScanTile(f=32, warps=4, stages=1),
    keys=ScanTile(f=32, warps=4, stages=1, e=32),
)
"""For GPUs with 99 KiB of shared memory a block and more; chosen by what fits, not measured."""
SMALL_DELTA = ScanTiles(
    chunk=32,
    system=ScanTile(f=64, warps=4, stages=1),
    local=ScanTile(f=64, warps=4, stages=1),
    carried=ScanTile(f=32, warps=4, stages=2),
    values=ScanTile(f=32, warps=4, stages=1),
    keys=ScanTile(f=32, warps=4, stages=1),
)
"""Likewise with the delta rule."""
LARGE = ScanTiles(
    chunk=64,
    system=ScanTile(f=64, warps=4, stages=1),
    local=ScanTile(f=64, warps=4, stages=2),
    carried=ScanTile(f=32, warps=4, stages=3),
    values=ScanTile(f=64, warps=4, stages=1),
    keys=ScanTile(f=64, warps=4, stages=1),
)
"""For GPUs with 227 KiB (sm_90, sm_100). Measured on an H200: `carried` matters most where one document fills the rows;
`keys` with two stages did not repeat its bits. In a chain of products Triton gives eight warps 128 rows, which are 64
twice.
"""


def tiles_for(device: torch.device, dtype: torch.dtype, delta: bool) -> ScanTiles:
    """The tiles for a device and the dtype of products."""
    if dtype == torch.float32:
        return WIDE
    if large(device):
        return LARGE
    return SMALL_DELTA if delta else SMALL
