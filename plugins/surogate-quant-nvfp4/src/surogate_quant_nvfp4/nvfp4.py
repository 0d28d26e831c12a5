"""NVFP4 weights: E2M1 codes, an E4M3 scale for each 16 of a row, one fp32 scale a weight (arXiv 2509.25149).

With amax the weight's largest absolute value and amax_b that of 16: s_enc = 448 · 6 / amax, s_b = E4M3(amax_b · s_enc
/ 6), and a weight is code · s_b / s_enc. With four-over-six (arXiv 2512.02010) s_enc is 1536 / amax, and 16 are scaled
to 4 instead of 6 where their squared error is strictly smaller. A weight is one tensor of bytes, each part from a
multiple of 16 on: codes [O, Q/2], the first of two in the lower half; scales [O, Q/16]; 1 / s_enc, fp32. Those are the
tensors of ModelOpt's checkpoints.

Suffixes: O outputs, I inputs, Q inputs up to the next multiple of 16, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from surogate_core.bundles import WeightSettings
from surogate_core.formats import fp4
from surogate_core.kernels.native import Module, Sources, missing_cupy

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max
BLOCK = 16
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Values that are worked on at a time, or one row: a core's cache, or what fills a GPU."""
THREADS = 256
VECTOR = 8
"""Values of a thread; as in the source."""
ROWS = 4

# Compiled as it is: by CuPy's own way numbers below 2⁻¹²⁶ would become 0.
_MODULE = Module(Sources.of(__file__, "surogate_native"), "unpack_nvfp4", specific=True)


def _sizes(outputs: int, inputs: int) -> tuple[int, int, int]:
    blocks = -(-inputs // BLOCK)
    return outputs * blocks * BLOCK // 2, outputs * blocks, 4


def nbytes(outputs: int, inputs: int, settings: WeightSettings) -> int:
    """Bytes of a weight."""
    return sum(-(-size // 16) * 16 for size in _sizes(outputs, inputs))


def parts(kept: Tensor, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the codes [O, Q/2], the scales [O, B] and 1 / s_enc [1]."""
    views, offset = [], 0
    for size in _sizes(outputs, inputs):
        views.append(kept[offset : offset + size])
        offset += -(-size // 16) * 16
    codes, scales, decode = views
    return codes.view(outputs, -1), scales.view(E4M3).view(outputs, -1), decode.view(torch.float32)


def _strips(outputs: int, inputs: int, device: torch.device) -> Iterator[slice]:
    step = max(1, CHUNK.get(device.type, 1 << 20) // inputs)
    for first in range(0, outputs, step):
        yield slice(first, min(first + step, outputs))


def _encode_scale(amax: Tensor, top: float) -> Tensor:
    """s_enc = top / amax: 1 where amax is 0, fp32's largest where it overflows; what is not finite stays so."""
    # A number over a tensor would be its reciprocal times the number, rounded twice.
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


def pack(weight_OI: Tensor, settings: WeightSettings) -> Tensor:
    """[bytes] uint8 of a weight in any float dtype."""
    outputs, inputs = weight_OI.shape
    device = weight_OI.device
    kept = torch.zeros(nbytes(outputs, inputs, settings), dtype=torch.uint8, device=device)
    codes, scales, decode = parts(kept, outputs, inputs)
    strips = list(_strips(outputs, inputs, device))
    amax = torch.stack([weight_OI[rows].abs().amax() for rows in strips]).amax().float()
    s_enc = _encode_scale(amax, 1536.0 if settings.qlora_four_over_six else E4M3_MAX * fp4.LARGEST)
    decode[0] = 1 / s_enc
    for rows in strips:
        x = pad(weight_OI[rows].float(), (0, -inputs % BLOCK))
        found, found_scales = _quantise(x.view(len(x), -1, BLOCK), s_enc, settings.qlora_four_over_six)
        codes[rows] = fp4.pairs(found.flatten(1))
        scales[rows] = found_scales
    # E2M1 knows neither infinity nor NaN; a weight that has one must not look sound.
    decode.copy_(torch.where(amax.isfinite(), decode, torch.nan))
    return kept


def adopt(tensors: Mapping[str, Tensor], settings: WeightSettings) -> Tensor:
    """What `pack` makes, of the codes [O, I/2], scales [O, I/16] and decode (0-d) of a checkpoint."""
    codes = tensors["codes"]
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    kept = torch.zeros(nbytes(outputs, inputs, settings), dtype=torch.uint8, device=codes.device)
    for own, theirs in zip(parts(kept, outputs, inputs), (codes, tensors["scales"], tensors["decode"]), strict=True):
        own.copy_(theirs)
    return kept


def unpack(kept: Tensor, room_OI: Tensor, settings: WeightSettings) -> None:
    """Write what `pack` made into [O, I] of any float dtype, whose rows may lie apart."""
    if takes(room_OI) and missing_cupy() is None:
        _launch(kept, room_OI)
    else:
        unpack_reference(kept, room_OI)


def unpack_reference(kept: Tensor, room_OI: Tensor) -> None:
    """In plain torch: code · scale, which is exact, times 1 / s_enc in fp32, then rounded to the room's dtype."""
    outputs, inputs = room_OI.shape
    codes, scales, decode = parts(kept, outputs, inputs)
    for rows in _strips(outputs, inputs, kept.device):
        x = fp4.values(fp4.unpaired(codes[rows])) * scales[rows].float().repeat_interleave(BLOCK, 1)
        room_OI[rows].copy_((x * decode)[:, :inputs])


def takes(room_OI: Tensor) -> bool:
    """Whether the kernel writes such a room: bf16 on a GPU, in pieces of 16 bytes."""
    aligned = room_OI.shape[1] % VECTOR == 0 and room_OI.stride(0) % VECTOR == 0 and room_OI.data_ptr() % 16 == 0
    return room_OI.device.type == "cuda" and room_OI.dtype == torch.bfloat16 and room_OI.stride(1) == 1 and aligned


def _launch(kept: Tensor, room_OI: Tensor) -> None:
    outputs, inputs = room_OI.shape
    codes, scales, decode = parts(kept, outputs, inputs)
    _MODULE.launch(
        "unpack_nvfp4",
        (-(-inputs // (THREADS * VECTOR)), -(-outputs // ROWS)),
        THREADS,
        codes,
        scales,
        decode,
        np.int32(scales.shape[1] * BLOCK),
        room_OI,
        room_OI.stride(0),
        np.int32(outputs),
        np.int32(inputs),
    )
