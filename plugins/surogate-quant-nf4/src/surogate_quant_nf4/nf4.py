"""NF4: 4-bit numbers of the quantiles of a normal distribution, in blocks with an absmax (arXiv 2305.14314).

Codes and absmax are those of bitsandbytes. A weight is one tensor of bytes:

    codes [n/2]           two a byte, the first in the upper half; blocks run along the row-major weight
    absmax codes [B]      with double quantisation: of absmax − offset, into the signed dynamic map
    group absmax [B/256]  fp32, one for 256 of them
    offset [1]            fp32, the mean absmax

Without double quantisation the absmax [B] itself, fp32, follows the codes. Each part begins at a multiple of 16 bytes.
Suffixes: O outputs, I inputs, B blocks, K values of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from surogate_core.bundles import WeightSettings
from surogate_core.formats.adamw_8bit import dynamic_map
from surogate_core.kernels.native import Module, Sources, missing_cupy

VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""What the codes 0 … 15 stand for (arXiv 2305.14314, appendix E), as fp32 has them."""

GROUP = 256
"""Absmax that share one of their own."""
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Values that are worked on at a time: a core's cache, or what fills a GPU."""
SMALLEST = 1e-38
"""Least absmax that is divided by."""
THREADS = 256
VECTOR = 8
"""Values of a thread; as in the source."""
ROWS = 4

# Compiled as it is: by CuPy's own way numbers below 2⁻¹²⁶ would become 0.
_MODULE = Module(Sources.of(__file__, "surogate_native"), "unpack_nf4", specific=True)
_tables: dict[torch.device, tuple[Tensor, Tensor]] = {}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a weight's bytes are."""

    count: int
    """Values of the weight."""
    block: int
    double: bool

    @property
    def blocks(self) -> int:
        """B."""
        return -(-self.count // self.block)

    @property
    def groups(self) -> int:
        """Groups of absmax."""
        return -(-self.blocks // GROUP)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the parts."""
        codes = -(-self.count // 2)
        return (codes, self.blocks, 4 * self.groups, 4) if self.double else (codes, 4 * self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return sum(-(-size // 16) * 16 for size in self.sizes)

    def parts(self, kept: Tensor) -> list[Tensor]:
        """Views of the parts: the codes, and (absmax codes, group absmax, offset) or (absmax,)."""
        found, offset = [], 0
        for number, size in enumerate(self.sizes):
            part = kept[offset : offset + size]
            narrow = number == 0 or (self.double and number == 1)
            found.append(part if narrow else part.view(torch.float32))
            offset += -(-size // 16) * 16
        return found

    @classmethod
    def of(cls, count: int, settings: WeightSettings) -> Layout:
        """The layout of a weight of so many values."""
        return cls(count, settings.qlora_bnb_block_size, settings.qlora_bnb_double_quant)


def _borders(values: Tensor) -> Tensor:
    return (values[:-1] + values[1:]) / 2


def _quantise(x_BK: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [B, K] uint8 of the nearest values, absmax [B]); a value in the middle gets the lower code."""
    absmax_B = x_BK.abs().amax(dim=1)
    scaled = (x_BK * (1 / absmax_B.clamp(min=SMALLEST))[:, None]).clamp_(-1, 1)
    return torch.bucketize(scaled, _borders(values), out_int32=True).to(torch.uint8), absmax_B


def nbytes(outputs: int, inputs: int, settings: WeightSettings) -> int:
    """Bytes of a weight."""
    return Layout.of(outputs * inputs, settings).nbytes


def pack(weight_OI: Tensor, settings: WeightSettings) -> Tensor:
    """[bytes] uint8 of a weight in any float dtype."""
    layout = Layout.of(weight_OI.numel(), settings)
    device = weight_OI.device
    kept = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    codes, *parts = layout.parts(kept)
    values = torch.tensor(VALUES, device=device)
    flat = weight_OI.reshape(-1)
    absmax_B = parts[0] if not layout.double else torch.empty(layout.blocks, device=device)
    step = CHUNK.get(device.type, 1 << 20)
    for first in range(0, layout.count, step):
        x = flat[first : first + step].float()
        x_BK = pad(x, (0, -len(x) % layout.block)).view(-1, layout.block)
        numbers, absmax = _quantise(x_BK, values)
        pairs = numbers.view(-1, 2)[: -(-len(x) // 2)]
        codes[first // 2 : first // 2 + len(pairs)] = (pairs[:, 0] << 4) | pairs[:, 1]
        absmax_B[first // layout.block : first // layout.block + len(absmax)] = absmax
    if layout.double:
        absmax_codes, group_absmax, offset = parts
        offset[0] = absmax_B.mean()
        rest = absmax_B - offset
        groups = pad(rest, (0, -len(rest) % GROUP)).view(-1, GROUP)
        numbers, absmax = _quantise(groups, dynamic_map(signed=True).to(device))
        absmax_codes.copy_(numbers.view(-1)[: layout.blocks])
        group_absmax.copy_(absmax)
    return kept


def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of both maps on the device; made once, so that graphs may be captured."""
    if device not in _tables:
        _tables[device] = torch.tensor(VALUES, device=device), dynamic_map(signed=True).to(device)
    return _tables[device]


def unpack(kept: Tensor, room_OI: Tensor, settings: WeightSettings) -> None:
    """Write what `pack` made into [O, I] of any float dtype, whose rows may lie apart."""
    layout = Layout.of(room_OI.numel(), settings)
    if takes(room_OI) and missing_cupy() is None:
        _launch(kept, room_OI, layout)
    else:
        unpack_reference(kept, room_OI, layout)


def unpack_reference(kept: Tensor, room_OI: Tensor, layout: Layout) -> None:
    """In plain torch: value · absmax in fp32, then rounded to the room's dtype."""
    codes, *parts = layout.parts(kept)
    values, map_values = _constants(kept.device)
    if layout.double:
        absmax_codes, group_absmax, offset = parts
        wide = group_absmax.repeat_interleave(GROUP)[: layout.blocks]
        absmax_B = map_values[absmax_codes.int()] * wide + offset
    else:
        absmax_B = parts[0]
    outputs, inputs = room_OI.shape
    # Chunks of whole rows that begin with a block.
    step = layout.block // math.gcd(inputs, layout.block)
    step *= max(1, CHUNK.get(kept.device.type, 1 << 20) // (inputs * step))
    for row in range(0, outputs, step):
        rows = min(step, outputs - row)
        first, count = row * inputs, rows * inputs
        part = codes[first // 2 : -(-(first + count) // 2)]
        x = values[torch.stack((part >> 4, part & 15), dim=1).view(-1).int()]
        x_BK = pad(x, (0, -len(x) % layout.block)).view(-1, layout.block)
        begin = first // layout.block
        x_BK = x_BK * absmax_B[begin : begin + len(x_BK), None]
        room_OI[row : row + rows].copy_(x_BK.view(-1)[:count].view(rows, inputs))


def takes(room_OI: Tensor) -> bool:
    """Whether the kernel writes such a room: bf16 on a GPU, in pieces of 16 bytes."""
    aligned = room_OI.shape[1] % VECTOR == 0 and room_OI.stride(0) % VECTOR == 0 and room_OI.data_ptr() % 16 == 0
    return room_OI.device.type == "cuda" and room_OI.dtype == torch.bfloat16 and room_OI.stride(1) == 1 and aligned


def _launch(kept: Tensor, room_OI: Tensor, layout: Layout) -> None:
    codes, *parts = layout.parts(kept)
    outputs, inputs = room_OI.shape
    _, map_values = _constants(kept.device)
    absmax = (*parts, map_values) if layout.double else (parts[0],)
    _MODULE.launch(
        "unpack_nf4_nested" if layout.double else "unpack_nf4",
        (-(-inputs // (THREADS * VECTOR)), -(-outputs // ROWS)),
        THREADS,
        codes,
        *absmax,
        np.int32(layout.block.bit_length() - 1),
        room_OI,
        room_OI.stride(0),
        np.int32(outputs),
        np.int32(inputs),
    )
