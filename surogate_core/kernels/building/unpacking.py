"""The common part of weight formats that have a CUDA kernel to unpack a weight, and of these kernels.

The grid covers a matrix [O, I] of bf16, or that of each expert, [E, O, I]. Each thread writes `VECTOR` neighbouring
values of a row, a thread block up to `THREADS` times as many of `ROWS` rows. These numbers must match the sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from surogate_core.bundles.weight_formats import WeightFormat
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


def at_sixteens(sizes: Sequence[int]) -> int:
    """Bytes of parts of these sizes, if each takes a multiple of 16."""
    return sum(-(-size // 16) * 16 for size in sizes)


def parts_at_sixteens(packed: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views [size] uint8 of a weight's parts, of which each begins at a multiple of 16."""
    return [packed[(begin := at_sixteens(sizes[:i])) : begin + size] for i, size in enumerate(sizes)]


class UnpackedByKernel(WeightFormat):
    """A weight format that a kernel of `unpacker` unpacks where it runs, and `unpack_reference` elsewhere.

    Suffixes as in `surogate_core.bundles.weight_formats`.
    """

    unpacker: ClassVar[Unpacker]

    def launch(self, packed: Tensor, outputs: int, inputs: int) -> tuple[str, Sequence[Tensor | np.generic]]:
        """(the kernel of a weight [nbytes] uint8, its own arguments), as `Unpacker.launch` takes them."""
        raise NotImplementedError

    def unpack_reference(self, packed: Tensor, room_OI: Tensor) -> None:
        """`unpack` in plain torch; the kernel has its bits."""
        raise NotImplementedError

    def unpack(self, packed: Tensor, room_OI: Tensor) -> None:
        """Unpack the result of `pack` into [O, I] of any float dtype, which may have gaps between rows."""
        if self.unpacker.runs(room_OI):
            self.unpacker.launch(*self.launch(packed, *room_OI.shape), room_OI)
        else:
            self.unpack_reference(packed, room_OI)

    def unpack_experts(self, packed_EB: Tensor, room_EOI: Tensor) -> None:
        """`unpack` for the weight of each expert, on a GPU by one kernel."""
        if self.unpacker.runs(room_EOI):
            sides = room_EOI.shape[1:]
            first = self.launch(packed_EB[0, : self.nbytes(*sides)], *sides)
            self.unpacker.launch(*first, room_EOI, apart=packed_EB.stride(0))
        else:
            super().unpack_experts(packed_EB, room_EOI)

    def note(self, device: torch.device) -> str | None:
        """A note on why the format is slow on the device, or None."""
        return self.unpacker.note(device)
