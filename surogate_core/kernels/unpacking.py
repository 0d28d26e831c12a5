"""The common part of CUDA kernels that unpack a weight of a weight format.

The grid covers a matrix [O, I] of bf16. Each thread writes `VECTOR` neighbouring values of a row, a thread block
`THREADS` times as many of `ROWS` rows. These numbers must match the sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from surogate_core.kernels.native import Module, Sources, missing_cupy

if TYPE_CHECKING:
    from collections.abc import Sequence

THREADS = 256
VECTOR = 8
ROWS = 4


class Unpacker:
    """A CUDA source with kernels that unpack weights of one format."""

    def __init__(self, sources: Sources, name: str, *, title: str):
        """`sources`: those of the plugin; `name`: the .cu file's; `title`: the format's name."""
        # Architecture-specific: CuPy's own compilation would flush numbers below 2⁻¹²⁶ to 0.
        self._module = Module(sources, name, specific=True)
        self._title = title

    @staticmethod
    def takes(room_OI: Tensor) -> bool:
        """Whether a kernel can write this workspace: bf16 on a GPU, in vectors of 16 bytes. It does not check for
        CuPy.
        """
        aligned = room_OI.shape[1] % VECTOR == 0 and room_OI.stride(0) % VECTOR == 0 and room_OI.data_ptr() % 16 == 0
        return room_OI.device.type == "cuda" and room_OI.dtype == torch.bfloat16 and room_OI.stride(1) == 1 and aligned

    def runs(self, room_OI: Tensor) -> bool:
        """Whether a kernel writes this workspace; otherwise plain torch does."""
        return self.takes(room_OI) and missing_cupy() is None

    def launch(self, function: str, packed: Sequence[Tensor | np.generic], room_OI: Tensor) -> None:
        """Launch a kernel of the source with its own arguments, then the workspace, its pitch and its sides."""
        outputs, inputs = room_OI.shape
        grid = -(-inputs // (THREADS * VECTOR)), -(-outputs // ROWS)
        sides = np.int32(outputs), np.int32(inputs)
        self._module.launch(function, grid, THREADS, *packed, room_OI, room_OI.stride(0), *sides)

    def note(self, device: torch.device) -> str | None:
        """A note on why the format is slow on a device, or None; for `WeightFormat.note`."""
        reason = missing_cupy() if device.type == "cuda" else None
        return (
            None
            if reason is None
            else f"weights are unpacked from {self._title} by plain torch, which is slow. {reason}"
        )
