"""MXFP4 weights: E2M1 codes and a power of two for 32 values of a row (OCP microscaling formats, version 1.0).

The power has the exponent ⌊log2 of the largest absolute value⌋ - 2, that of the standard's section 6.3, and is kept as
E8M0: the exponent + 127, 255 for NaN. A weight is one tensor of bytes, in which each part begins at a multiple of 16:
codes [O, Q/2], the first of two in the lower half; powers [O, Q/32]. These are the tensors of gpt-oss's checkpoints.

Suffixes: O outputs, I inputs, Q inputs up to the next multiple of 32, B blocks of a row, K values of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from surogate_core.plugin import bundles, compute, fp4

BLOCK = 32
BIAS, NAN = 127, 255
LARGEST_EXPONENT = 2
"""Exponent of the largest number of E2M1, 6."""
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Values that are processed at a time, or one row: they fit into a core's cache, or fill a GPU."""
UNPACKER = compute.Unpacker(compute.Sources.of(__file__, "surogate_native"), "unpack_mxfp4", title="MXFP4")


def _sizes(outputs: int, inputs: int) -> tuple[int, int]:
    blocks = -(-inputs // BLOCK)
    return outputs * blocks * BLOCK // 2, outputs * blocks


def parts_of(packed: Tensor, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Views of the codes [O, Q/2] and the powers [O, B]."""
    codes, powers = _sizes(outputs, inputs)
    begin = -(-codes // 16) * 16
    return packed[:codes].view(outputs, -1), packed[begin : begin + powers].view(outputs, -1)


def _strips(outputs: int, inputs: int, device: torch.device) -> Iterator[slice]:
    step = max(1, CHUNK.get(device.type, 1 << 20) // inputs)
    for first in range(0, outputs, step):
        yield slice(first, min(first + step, outputs))


def _powers(codes: Tensor) -> Tensor:
    """The fp32 value of each power."""
    found = torch.ldexp(torch.ones_like(codes, dtype=torch.float32), codes.int() - BIAS)
    return torch.where(codes == NAN, torch.nan, found)


class MXFP4Format(bundles.WeightFormat):
    """The format."""

    name = "mxfp4"

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight."""
        return sum(-(-size // 16) * 16 for size in _sizes(outputs, inputs))

    def pack(self, weight_OI: Tensor) -> Tensor:
        """[bytes] uint8 of a weight in any float dtype."""
        outputs, inputs = weight_OI.shape
        packed = torch.zeros(self.nbytes(outputs, inputs), dtype=torch.uint8, device=weight_OI.device)
        codes, powers = parts_of(packed, outputs, inputs)
        for rows in _strips(outputs, inputs, weight_OI.device):
            x_OBK = pad(weight_OI[rows].float(), (0, -inputs % BLOCK)).unflatten(1, (-1, BLOCK))
            amax_OB = x_OBK.abs().amax(-1)
            # frexp has a mantissa in [½, 1), so its exponent is one more than the floor of the logarithm.
            exponents = torch.frexp(amax_OB).exponent - 1 - LARGEST_EXPONENT + BIAS
            found = torch.where(amax_OB == 0, BIAS, exponents.clamp(1, NAN - 1))
            found = torch.where(amax_OB.isfinite(), found, NAN).to(torch.uint8)
            powers[rows] = found
            codes[rows] = fp4.pairs(fp4.encode(x_OBK / _powers(found)[..., None]).flatten(1))
        return packed

    def adopt(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The result of `pack`, from the codes [O, I/32, 16] or [O, I/2] and scales [O, I/32] of a checkpoint."""
        codes = parts["codes"].flatten(1)
        outputs, inputs = codes.shape[0], 2 * codes.shape[1]
        packed = torch.zeros(self.nbytes(outputs, inputs), dtype=torch.uint8, device=codes.device)
        for own, given in zip(parts_of(packed, outputs, inputs), (codes, parts["scales"]), strict=True):
            own.copy_(given)
        return packed

    def unpack(self, packed: Tensor, room_OI: Tensor) -> None:
        """Unpack the result of `pack` into [O, I] of any float dtype, which may have gaps between rows."""
        if UNPACKER.runs(room_OI):
            self._launch(packed, room_OI)
        else:
            self.unpack_reference(packed, room_OI)

    def unpack_experts(self, packed_EB: Tensor, room_EOI: Tensor) -> None:
        """`unpack` for the weight of each expert, on a GPU by one kernel."""
        if UNPACKER.runs(room_EOI):
            self._launch(packed_EB[0], room_EOI, apart=packed_EB.stride(0))
        else:
            super().unpack_experts(packed_EB, room_EOI)

    def _launch(self, packed: Tensor, room: Tensor, *, apart: int = 0) -> None:
        codes, powers = parts_of(packed, room.shape[-2], room.shape[-1])
        UNPACKER.launch("unpack_mxfp4", (codes, powers, np.int32(powers.shape[1] * BLOCK)), room, apart=apart)

    def unpack_reference(self, packed: Tensor, room_OI: Tensor) -> None:
        """In plain torch: code · power, which is exact in fp32, rounded to the workspace's dtype."""
        outputs, inputs = room_OI.shape
        codes, powers = parts_of(packed, outputs, inputs)
        for rows in _strips(outputs, inputs, packed.device):
            x = fp4.values(fp4.unpaired(codes[rows])) * _powers(powers[rows]).repeat_interleave(BLOCK, 1)
            room_OI[rows].copy_(x[:, :inputs])

    def note(self, device: torch.device) -> str | None:
        """A note on why the format is slow on the device, or None."""
        return UNPACKER.note(device)
