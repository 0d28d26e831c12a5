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
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from surogate_core.plugin import adamw_8bit, compute

if TYPE_CHECKING:
    from surogate_quant_nf4 import NF4Options

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
"""The values of the codes 0 … 15 (arXiv 2305.14314, appendix E), in fp32."""

GROUP = 256
"""Number of absmax values that share a group absmax."""
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Values that are processed at a time: they fit into a core's cache, or fill a GPU."""
SMALLEST = 1e-38
"""Smallest divisor of a block."""
UNPACKER = compute.Unpacker(compute.Sources.of(__file__, "surogate_native"), "unpack_nf4", title="NF4")
_tables: dict[torch.device, tuple[Tensor, Tensor]] = {}


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of the parts in a weight's bytes."""

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
        return compute.at_sixteens(self.sizes)

    def parts(self, packed: Tensor) -> list[Tensor]:
        """Views of the parts: the codes, and (absmax codes, group absmax, offset) or (absmax,)."""
        narrow = 1 + self.double
        parts = compute.parts_at_sixteens(packed, self.sizes)
        return [*parts[:narrow], *(part.view(torch.float32) for part in parts[narrow:])]


def _borders(values: Tensor) -> Tensor:
    return (values[:-1] + values[1:]) / 2


def _quantise(x_BK: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [B, K] uint8 of the nearest values, absmax [B]); a value in the middle gets the lower code."""
    absmax_B = x_BK.abs().amax(dim=1)
    scaled = (x_BK * (1 / absmax_B.clamp(min=SMALLEST))[:, None]).clamp_(-1, 1)
    return torch.bucketize(scaled, _borders(values), out_int32=True).to(torch.uint8), absmax_B


def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of both maps on the device, made once, so that CUDA graphs can be captured."""
    if device not in _tables:
        _tables[device] = torch.tensor(VALUES, device=device), adamw_8bit.dynamic_map(signed=True).to(device)
    return _tables[device]


class NF4(compute.UnpackedByKernel):
    """The format with one size of blocks, and with or without double quantisation."""

    name, unpacker = "nf4", UNPACKER

    def __init__(self, options: NF4Options):
        self.block, self.double = options.block_size, options.double_quant

    def layout(self, count: int) -> Layout:
        """The layout of a weight of that many values."""
        return Layout(count, self.block, self.double)

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight."""
        return self.layout(outputs * inputs).nbytes

    def pack(self, weight_OI: Tensor) -> Tensor:
        """[bytes] uint8 of a weight in any float dtype."""
        layout = self.layout(weight_OI.numel())
        device = weight_OI.device
        packed = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        codes, *parts = layout.parts(packed)
        values, map_values = _constants(device)
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
            numbers, absmax = _quantise(groups, map_values)
            absmax_codes.copy_(numbers.view(-1)[: layout.blocks])
            group_absmax.copy_(absmax)
        return packed

    def launch(self, packed: Tensor, outputs: int, inputs: int) -> tuple[str, tuple[Tensor | np.generic, ...]]:
        """(its kernel, the arguments)."""
        layout = self.layout(outputs * inputs)
        codes, *parts = layout.parts(packed)
        _, map_values = _constants(packed.device)
        absmax = (*parts, map_values) if layout.double else (parts[0],)
        function = "unpack_nf4_nested" if layout.double else "unpack_nf4"
        return function, (codes, *absmax, np.int32(layout.block.bit_length() - 1))

    def unpack_reference(self, packed: Tensor, room_OI: Tensor) -> None:
        """In plain torch: value · absmax in fp32, then rounded to the workspace's dtype."""
        layout = self.layout(room_OI.numel())
        codes, *parts = layout.parts(packed)
        values, map_values = _constants(packed.device)
        if layout.double:
            absmax_codes, group_absmax, offset = parts
            wide = group_absmax.repeat_interleave(GROUP)[: layout.blocks]
            absmax_B = map_values[absmax_codes.int()] * wide + offset
        else:
            absmax_B = parts[0]
        outputs, inputs = room_OI.shape
        # Chunks of whole rows that begin with a block.
        step = layout.block // math.gcd(inputs, layout.block)
        step *= max(1, CHUNK.get(packed.device.type, 1 << 20) // (inputs * step))
        for row in range(0, outputs, step):
            rows = min(step, outputs - row)
            first, count = row * inputs, rows * inputs
            part = codes[first // 2 : -(-(first + count) // 2)]
            x = values[torch.stack((part >> 4, part & 15), dim=1).view(-1).int()]
            x_BK = pad(x, (0, -len(x) % layout.block)).view(-1, layout.block)
            begin = first // layout.block
            x_BK = x_BK * absmax_B[begin : begin + len(x_BK), None]
            room_OI[row : row + rows].copy_(x_BK.view(-1)[:count].view(rows, inputs))
