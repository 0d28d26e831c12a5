"""MXFP4 weights: E2M1 codes and a power of two for 32 values of a row (OCP microscaling formats, version 1.0).

The power has the exponent ⌊log2 of the largest absolute value⌋ - 2, that of the standard's section 6.3, and is kept as
E8M0: the exponent + 127, 255 for NaN. A weight is one tensor of bytes, in which each part begins at a multiple of 16:
codes [O, Q/2], the first of two in the lower half; powers [O, Q/32]. These are the tensors of gpt-oss's checkpoints.

Suffixes: O outputs, I inputs, Q inputs up to the next multiple of 32, B blocks of a row, K values of a block.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from surogate_core.plugin import compute, fp4

BLOCK = 32
BIAS, NAN = 127, 255
LARGEST_EXPONENT = 2
"""Exponent of the largest number of E2M1, 6."""
UNPACKER = compute.Unpacker(compute.Sources.of(__file__, "surogate_native"), "unpack_mxfp4", title="MXFP4")


def _sizes(outputs: int, inputs: int) -> tuple[int, int]:
    blocks = -(-inputs // BLOCK)
    return outputs * blocks * BLOCK // 2, outputs * blocks


def parts_of(packed: Tensor, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Views of the codes [O, Q/2] and the powers [O, B]."""
    codes, powers = compute.parts_at_sixteens(packed, _sizes(outputs, inputs))
    return codes.view(outputs, -1), powers.view(outputs, -1)


def _powers(codes: Tensor) -> Tensor:
    """The fp32 value of each power."""
    found = torch.ldexp(torch.ones_like(codes, dtype=torch.float32), codes.int() - BIAS)
    return torch.where(codes == NAN, torch.nan, found)


class MXFP4Format(compute.UnpackedByKernel):
    """The format."""

    name, unpacker = "mxfp4", UNPACKER

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight."""
        return compute.at_sixteens(_sizes(outputs, inputs))

    def pack(self, weight_OI: Tensor) -> Tensor:
        """[bytes] uint8 of a weight in any float dtype."""
        outputs, inputs = weight_OI.shape
        packed = torch.zeros(self.nbytes(outputs, inputs), dtype=torch.uint8, device=weight_OI.device)
        codes, powers = parts_of(packed, outputs, inputs)
        for rows in fp4.strips(outputs, inputs, weight_OI.device):
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

    def launch(self, packed: Tensor, outputs: int, inputs: int) -> tuple[str, tuple[Tensor | np.generic, ...]]:
        """(its kernel, the arguments)."""
        codes, powers = parts_of(packed, outputs, inputs)
        return "unpack_mxfp4", (codes, powers, np.int32(powers.shape[1] * BLOCK))

    def unpack_reference(self, packed: Tensor, room_OI: Tensor) -> None:
        """In plain torch: code · power, which is exact in fp32, rounded to the workspace's dtype."""
        outputs, inputs = room_OI.shape
        codes, powers = parts_of(packed, outputs, inputs)
        for rows in fp4.strips(outputs, inputs, packed.device):
            x = fp4.values(fp4.unpaired(codes[rows])) * _powers(powers[rows]).repeat_interleave(BLOCK, 1)
            room_OI[rows].copy_(x[:, :inputs])
