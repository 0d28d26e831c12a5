"""E4M3 codes with one fp32 scale for each square block of a weight.

The convention is that of fine-grained FP8 checkpoints (arXiv 2412.19437): weight = code · scale, scale = amax / 448.
A weight is one tensor of bytes: the codes [O, I], then from a multiple of 16 bytes on the scales [P, Q] of the blocks.
Suffixes: O outputs, I inputs, P rows and Q columns of blocks, at the edges of which are parts of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from surogate_core.bundles import WeightSettings
from surogate_core.kernels.native import Module, Sources, missing_cupy

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Values that are worked on at a time, or one row of blocks: a core's cache, or what fills a GPU."""
THREADS = 256
VECTOR = 8
"""Values of a thread; as in the source."""
ROWS = 4

# Compiled as it is: by CuPy's own way numbers below 2⁻¹²⁶ would become 0.
_MODULE = Module(Sources.of(__file__, "surogate_native"), "unpack_fp8", specific=True)


def _grid(outputs: int, inputs: int, block: int) -> tuple[int, int]:
    return -(-outputs // block), -(-inputs // block)


def _codes_bytes(outputs: int, inputs: int) -> int:
    return -(-outputs * inputs // 16) * 16


def nbytes(outputs: int, inputs: int, settings: WeightSettings) -> int:
    """Bytes of a weight."""
    rows, columns = _grid(outputs, inputs, settings.qlora_block_size)
    return _codes_bytes(outputs, inputs) + 4 * rows * columns


def parts(kept: Tensor, outputs: int, inputs: int, settings: WeightSettings) -> tuple[Tensor, Tensor]:
    """Views of the codes [O, I] and the scales [P, Q]."""
    grid = _grid(outputs, inputs, settings.qlora_block_size)
    codes_OI = kept[: outputs * inputs].view(E4M3).view(outputs, inputs)
    return codes_OI, kept[_codes_bytes(outputs, inputs) :].view(torch.float32).view(grid)


def _strips(outputs: int, inputs: int, block: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """(rows, rows of blocks) that are worked on at a time."""
    step = max(1, CHUNK.get(device.type, 1 << 20) // (inputs * block))
    for first in range(0, -(-outputs // block), step):
        yield slice(first * block, min((first + step) * block, outputs)), slice(first, first + step)


def pack(weight_OI: Tensor, settings: WeightSettings) -> Tensor:
    """[bytes] uint8 of a weight in any float dtype. A block of zeros has the scale 1."""
    outputs, inputs = weight_OI.shape
    block, device = settings.qlora_block_size, weight_OI.device
    kept = torch.zeros(nbytes(outputs, inputs, settings), dtype=torch.uint8, device=device)
    codes_OI, scales_PQ = parts(kept, outputs, inputs, settings)
    for rows, blocks in _strips(outputs, inputs, block, device):
        x = weight_OI[rows].float()
        count = len(x)
        x = pad(x, (0, -inputs % block, 0, -count % block))
        tiles = x.view(len(x) // block, block, -1, block)
        scales = tiles.abs().amax((1, 3)) / LARGEST
        scales = torch.where(scales == 0, 1.0, scales)
        codes = (tiles / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(E4M3)
        scales_PQ[blocks] = scales
        codes_OI[rows] = codes.view(x.shape)[:count, :inputs]
    return kept


def adopt(tensors: Mapping[str, Tensor], settings: WeightSettings) -> Tensor:
    """What `pack` makes, of the codes [O, I] and scales [P, Q] of a checkpoint with blocks of the same size."""
    codes, scales = tensors["codes"], tensors["scales"]
    outputs, inputs = codes.shape
    kept = torch.zeros(nbytes(outputs, inputs, settings), dtype=torch.uint8, device=codes.device)
    codes_OI, scales_PQ = parts(kept, outputs, inputs, settings)
    codes_OI.copy_(codes)
    scales_PQ.copy_(scales)
    return kept


def unpack(kept: Tensor, room_OI: Tensor, settings: WeightSettings) -> None:
    """Write what `pack` made into [O, I] of any float dtype, whose rows may lie apart."""
    if takes(room_OI) and missing_cupy() is None:
        _launch(kept, room_OI, settings)
    else:
        unpack_reference(kept, room_OI, settings)


def unpack_reference(kept: Tensor, room_OI: Tensor, settings: WeightSettings) -> None:
    """In plain torch: code · scale in fp32, then rounded to the room's dtype."""
    outputs, inputs = room_OI.shape
    block = settings.qlora_block_size
    codes_OI, scales_PQ = parts(kept, outputs, inputs, settings)
    for rows, blocks in _strips(outputs, inputs, block, kept.device):
        wide = scales_PQ[blocks].repeat_interleave(block, 1)[:, :inputs].repeat_interleave(block, 0)
        room_OI[rows].copy_(codes_OI[rows].float() * wide[: rows.stop - rows.start])


def takes(room_OI: Tensor) -> bool:
    """Whether the kernel writes such a room: bf16 on a GPU, in pieces of 16 bytes."""
    aligned = room_OI.shape[1] % VECTOR == 0 and room_OI.stride(0) % VECTOR == 0 and room_OI.data_ptr() % 16 == 0
    return room_OI.device.type == "cuda" and room_OI.dtype == torch.bfloat16 and room_OI.stride(1) == 1 and aligned


def _launch(kept: Tensor, room_OI: Tensor, settings: WeightSettings) -> None:
    outputs, inputs = room_OI.shape
    codes_OI, scales_PQ = parts(kept, outputs, inputs, settings)
    _MODULE.launch(
        "unpack_fp8",
        (-(-inputs // (THREADS * VECTOR)), -(-outputs // ROWS)),
        THREADS,
        codes_OI,
        scales_PQ,
        np.int32(settings.qlora_block_size.bit_length() - 1),
        np.int32(scales_PQ.shape[1]),
        room_OI,
        room_OI.stride(0),
        np.int32(outputs),
        np.int32(inputs),
    )
