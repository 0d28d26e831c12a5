"""E4M3 codes with one fp32 scale for each square block of a weight.

The convention is that of fine-grained FP8 checkpoints (arXiv 2412.19437): weight = code · scale, scale = amax / 448. A
weight is one tensor of bytes: the codes [O, I], then, at a multiple of 16 bytes, the scales [P, Q] of the blocks.
Suffixes: O outputs, I inputs, P rows and Q columns of blocks; blocks at the edges may be partial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from surogate_core.plugin import compute

if TYPE_CHECKING:
    from surogate_quant_fp8 import FP8FormatOptions

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Values that are processed at a time, or one row of blocks: they fit into a core's cache, or fill a GPU."""
UNPACKER = compute.Unpacker(compute.Sources.of(__file__, "surogate_native"), "unpack_fp8", title="FP8")


def _codes_bytes(outputs: int, inputs: int) -> int:
    return -(-outputs * inputs // 16) * 16


class FP8(compute.UnpackedByKernel):
    """The format with blocks of one size."""

    name, unpacker = "fp8", UNPACKER

    def __init__(self, options: FP8FormatOptions):
        self.block = options.block_size

    def _grid(self, outputs: int, inputs: int) -> tuple[int, int]:
        return -(-outputs // self.block), -(-inputs // self.block)

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight."""
        rows, columns = self._grid(outputs, inputs)
        return _codes_bytes(outputs, inputs) + 4 * rows * columns

    def parts(self, packed: Tensor, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        """Views of the codes [O, I] and the scales [P, Q]."""
        codes_OI = packed[: outputs * inputs].view(E4M3).view(outputs, inputs)
        scales = packed[_codes_bytes(outputs, inputs) :].view(torch.float32)
        return codes_OI, scales.view(self._grid(outputs, inputs))

    def _strips(self, outputs: int, inputs: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
        """(rows, rows of blocks) that are processed at a time."""
        block = self.block
        step = max(1, CHUNK.get(device.type, 1 << 20) // (inputs * block))
        for first in range(0, -(-outputs // block), step):
            yield slice(first * block, min((first + step) * block, outputs)), slice(first, first + step)

    def pack(self, weight_OI: Tensor) -> Tensor:
        """[bytes] uint8 of a weight in any float dtype. A block of zeros has the scale 1."""
        outputs, inputs = weight_OI.shape
        block, device = self.block, weight_OI.device
        packed = torch.zeros(self.nbytes(outputs, inputs), dtype=torch.uint8, device=device)
        codes_OI, scales_PQ = self.parts(packed, outputs, inputs)
        for rows, blocks in self._strips(outputs, inputs, device):
            x = weight_OI[rows].float()
            count = len(x)
            x = pad(x, (0, -inputs % block, 0, -count % block))
            tiles = x.view(len(x) // block, block, -1, block)
            scales = tiles.abs().amax((1, 3)) / LARGEST
            scales = torch.where(scales == 0, 1.0, scales)
            codes = (tiles / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(E4M3)
            scales_PQ[blocks] = scales
            codes_OI[rows] = codes.view(x.shape)[:count, :inputs]
        return packed

    def adopts(self, block: tuple[int, int] | None) -> bool:
        """Whether the checkpoint's blocks have this format's size."""
        return block in (None, (self.block, self.block))

    def adopt(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The result of `pack`, from the codes [O, I] and scales [P, Q] of a checkpoint with blocks of the same
        size.
        """
        codes, scales = parts["codes"], parts["scales"]
        outputs, inputs = codes.shape
        packed = torch.zeros(self.nbytes(outputs, inputs), dtype=torch.uint8, device=codes.device)
        codes_OI, scales_PQ = self.parts(packed, outputs, inputs)
        codes_OI.copy_(codes)
        scales_PQ.copy_(scales)
        return packed

    def launch(self, packed: Tensor, outputs: int, inputs: int) -> tuple[str, tuple[Tensor | np.generic, ...]]:
        """(its kernel, the arguments)."""
        codes_OI, scales_PQ = self.parts(packed, outputs, inputs)
        return "unpack_fp8", (codes_OI, scales_PQ, np.int32(self.block.bit_length() - 1), np.int32(scales_PQ.shape[1]))

    def unpack_reference(self, packed: Tensor, room_OI: Tensor) -> None:
        """In plain torch: code · scale in fp32, then rounded to the workspace's dtype."""
        outputs, inputs = room_OI.shape
        block = self.block
        codes_OI, scales_PQ = self.parts(packed, outputs, inputs)
        for rows, blocks in self._strips(outputs, inputs, packed.device):
            wide = scales_PQ[blocks].repeat_interleave(block, 1)[:, :inputs].repeat_interleave(block, 0)
            room_OI[rows].copy_(codes_OI[rows].float() * wide[: rows.stop - rows.start])
