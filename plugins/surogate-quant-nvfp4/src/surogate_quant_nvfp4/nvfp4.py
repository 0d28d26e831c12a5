"""NVFP4 weights: E2M1 codes, an E4M3 scale per 16 values of a row, one fp32 scale per matrix (arXiv 2509.25149).

With amax the weight's largest absolute value and amax_b that of 16: s_enc = 448 · 6 / amax, s_b = E4M3(amax_b · s_enc /
6), and a weight is code · s_b / s_enc. With four-over-six (arXiv 2512.02010) s_enc is 1536 / amax, and 16 values are
scaled to 4 instead of 6 if their squared error is then strictly smaller. With `search_scales` s_b is the best of eleven
E4M3 numbers around amax_b · s_enc / 6. A weight is one tensor of bytes, in which each
part begins at a multiple of 16: codes [O, Q/2], the first of two in the lower half; scales [O, Q/16]; 1 / s_enc, fp32.
These are the tensors of ModelOpt's checkpoints.

Suffixes: O outputs, I inputs, Q inputs up to the next multiple of 16, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from surogate_core.plugin import compute, fp4, nvfp4

if TYPE_CHECKING:
    from surogate_quant_nvfp4 import NVFP4FormatOptions

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max
BLOCK = 16
UNPACKER = compute.Unpacker(compute.Sources.of(__file__, "surogate_native"), "unpack_nvfp4", title="NVFP4")


def _sizes(outputs: int, inputs: int) -> tuple[int, int, int]:
    blocks = -(-inputs // BLOCK)
    return outputs * blocks * BLOCK // 2, outputs * blocks, 4


def parts_of(packed: Tensor, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the codes [O, Q/2], the scales [O, B] and 1 / s_enc [1]."""
    codes, scales, decode = compute.parts_at_sixteens(packed, _sizes(outputs, inputs))
    return codes.view(outputs, -1), scales.view(E4M3).view(outputs, -1), decode.view(torch.float32)


def _encode_scale(amax: Tensor, top: float) -> Tensor:
    """s_enc = top / amax: 1 if amax is 0, the largest fp32 if it overflows; an amax that is not finite gives a scale
    that is not finite.
    """
    # torch computes a number divided by a tensor as its reciprocal times the number, which rounds twice.
    scale = (torch.full_like(amax, top) / amax).clamp(max=FP32_MAX)
    return torch.where(amax == 0, 1.0, scale)


def _codes(x_OBK: Tensor, scales: Tensor, decode: Tensor) -> Tensor:
    """Codes at these scales; 0 where a scale is 0."""
    divisor = (scales.float() * decode)[..., None]
    return fp4.encode(torch.where(divisor == 0, 0.0, x_OBK / torch.where(divisor == 0, 1.0, divisor)))


def _error(x_OBK: Tensor, codes: Tensor, scales: Tensor, decode: Tensor) -> Tensor:
    found = fp4.values(codes).double() * (scales.double() * decode.double())[..., None]
    return (found - x_OBK.double()).square().sum(-1)


def _quantise(x_OBK: Tensor, s_enc: Tensor, four_over_six: bool) -> tuple[Tensor, Tensor]:
    """(codes [O, B, 16], scales [O, B]) of blocks."""
    decode, amax = 1 / s_enc, x_OBK.abs().amax(-1)
    if not four_over_six:
        scales = (amax * s_enc / fp4.LARGEST).clamp(max=E4M3_MAX).to(E4M3)
        return _codes(x_OBK, scales, decode), scales
    unrounded = amax / fp4.LARGEST * s_enc
    six, four = ((unrounded * factor).clamp(max=E4M3_MAX).to(E4M3) for factor in (1.0, 1.5))
    to_six, to_four = _codes(x_OBK, six, decode), _codes(x_OBK, four, decode)
    take_four = _error(x_OBK, to_four, four, decode) < _error(x_OBK, to_six, six, decode)
    # torch.where does not take float8.
    scales = torch.where(take_four, four.float(), six.float()).to(E4M3)
    return torch.where(take_four[..., None], to_four, to_six), scales


class NVFP4Format(compute.UnpackedByKernel):
    """The format with the block scales of its options."""

    name, unpacker = "nvfp4", UNPACKER

    def __init__(self, options: NVFP4FormatOptions):
        self.four_over_six, self.search = options.four_over_six, options.search_scales

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight."""
        return compute.at_sixteens(_sizes(outputs, inputs))

    def pack(self, weight_OI: Tensor) -> Tensor:
        """[bytes] uint8 of a weight in any float dtype."""
        outputs, inputs = weight_OI.shape
        device = weight_OI.device
        packed = torch.zeros(self.nbytes(outputs, inputs), dtype=torch.uint8, device=device)
        codes, scales, decode = parts_of(packed, outputs, inputs)
        strips = list(fp4.strips(outputs, inputs, device))
        amax = torch.stack([weight_OI[rows].abs().amax() for rows in strips]).amax().float()
        s_enc = _encode_scale(amax, 1536.0 if self.four_over_six or self.search else E4M3_MAX * fp4.LARGEST)
        decode[0] = 1 / s_enc
        for rows in strips:
            x = pad(weight_OI[rows].float(), (0, -inputs % BLOCK))
            x_OBK = x.view(len(x), -1, BLOCK)
            if self.search:
                tiles, found_scales = nvfp4.searched(x_OBK[..., None, :], s_enc)
                found = tiles.squeeze(-2)
            else:
                found, found_scales = _quantise(x_OBK, s_enc, self.four_over_six)
            codes[rows] = fp4.pairs(found.flatten(1))
            scales[rows] = found_scales
        # E2M1 has neither infinity nor NaN, and a weight with one of them must not look valid.
        decode.copy_(torch.where(amax.isfinite(), decode, torch.nan))
        return packed

    def adopt(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The result of `pack`, from the codes [O, I/2], scales [O, I/16] and decode (0-d) of a checkpoint."""
        codes = parts["codes"]
        outputs, inputs = codes.shape[0], 2 * codes.shape[1]
        packed = torch.zeros(self.nbytes(outputs, inputs), dtype=torch.uint8, device=codes.device)
        theirs = codes, parts["scales"], parts["decode"]
        for own, given in zip(parts_of(packed, outputs, inputs), theirs, strict=True):
            own.copy_(given)
        return packed

    def launch(self, packed: Tensor, outputs: int, inputs: int) -> tuple[str, tuple[Tensor | np.generic, ...]]:
        """(its kernel, the arguments)."""
        codes, scales, decode = parts_of(packed, outputs, inputs)
        return "unpack_nvfp4", (codes, scales, decode, np.int32(scales.shape[1] * BLOCK))

    def unpack_reference(self, packed: Tensor, room_OI: Tensor) -> None:
        """In plain torch: code · scale, which is exact, times 1 / s_enc in fp32, then rounded to the workspace's
        dtype.
        """
        outputs, inputs = room_OI.shape
        codes, scales, decode = parts_of(packed, outputs, inputs)
        for rows in fp4.strips(outputs, inputs, packed.device):
            x = fp4.values(fp4.unpaired(codes[rows])) * scales[rows].float().repeat_interleave(BLOCK, 1)
            room_OI[rows].copy_((x * decode)[:, :inputs])
