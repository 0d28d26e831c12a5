"""The common part of CUDA kernels that unpack a weight of a weight format.

The grid covers a matrix [O, I] of bf16, or that of each expert, [E, O, I]. Each thread writes `VECTOR` neighbouring
values of a row, a thread block up to `THREADS` times as many of `ROWS` rows. These numbers must match the sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from surogate_core.kernels.building.native import Module, Sources, missing_cupy

if TYPE_CHECKING:
    from collections.abc import Sequence

THREADS = 256
WARP = 32
VECTOR = 8
ROWS = 4


class Unpacker:
    """A CUDA source with kernels that unpack weights of one format."""

    def __init__(self, sources: Sources, name: str, *, title: str):
        """`sources`: the plugin's; `name`: the .cu file's; `title`: the format's name."""
        # Architecture-specific: CuPy's own compilation would flush numbers below 2⁻¹²⁶ to 0.
        self._module = Module(sources, name, specific=True)
        self._title = title

    @staticmethod
    def takes(room: Tensor) -> bool:
        """Whether a kernel can write this workspace: bf16 on a GPU, in vectors of 16 bytes. It does not check for
        CuPy.
        """
        whole = [room.shape[-1], *room.stride()[:-1]]
        aligned = all(count % VECTOR == 0 for count in whole) and room.data_ptr() % 16 == 0
        return room.device.type == "cuda" and room.dtype == torch.bfloat16 and room.stride(-1) == 1 and aligned

    def runs(self, room: Tensor) -> bool:
        """Whether a kernel writes this workspace; otherwise plain torch does."""
        return self.takes(room) and missing_cupy() is None

    def launch(self, function: str, packed: Sequence[Tensor | np.generic], room: Tensor, *, apart: int = 0) -> None:
        """Launch a kernel of the source with its own arguments, then the workspace, its pitch and its sides.

        `room`: [O, I], or [E, O, I] with the first expert's arguments; the other experts' are `apart` bytes further
        each.
        """
        outputs, inputs = room.shape[-2:]
        experts, between = (room.shape[0], room.stride(0)) if room.dim() == 3 else (1, 0)
        # Narrow matrices have thread blocks of whole warps without idle ones.
        threads = min(THREADS, -(-inputs // (VECTOR * WARP)) * WARP)
        grid = -(-inputs // (threads * VECTOR)), -(-outputs // ROWS), experts
        sides = np.int32(outputs), np.int32(inputs)
        strides = apart, between * room.itemsize
        self._module.launch(function, grid, threads, *packed, room, room.stride(-2), *sides, *strides)

    def note(self, device: torch.device) -> str | None:
        """A note on why the format is slow on a device, or None; for `WeightFormat.note`."""
        reason = missing_cupy() if device.type == "cuda" else None
        return (
            None
            if reason is None
            else f"weights are unpacked from {self._title} by plain torch, which is slow. {reason}"
        )
