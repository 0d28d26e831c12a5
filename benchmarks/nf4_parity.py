"""NF4 against bitsandbytes: codes, absmax and unpacked weights of 10^7 values, on this machine's CPU and GPU.

bitsandbytes is not a requirement of Surogate: `pip install bitsandbytes` first. For each block size, with double
quantisation and without, the number of values whose code differs, and the number of absmax and unpacked values whose
bits do. On a GPU bitsandbytes' own CUDA kernels are compared with.

    python benchmarks/nf4_parity.py [--values 10000000] [--devices cpu cuda]

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from bitsandbytes import functional
from surogate_quant_nf4 import NF4Options
from surogate_quant_nf4.nf4 import GROUP, NF4
from torch import Tensor

INPUTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """How many of each are not equal, bit for bit."""

    codes: int
    absmax: int
    """Without double quantisation the absmax; with it their codes, the group's absmax and the offset."""
    values: int


def weights(count: int, device: torch.device) -> dict[str, Tensor]:
    """Matrices [O, I] in bf16 of about so many values each, of several distributions."""
    generator = torch.Generator().manual_seed(0)
    shape = (count // INPUTS, INPUTS)
    normal = torch.randn(shape, generator=generator)
    scales = torch.exp(2 * torch.randn((shape[0], 1), generator=generator))
    uniform = torch.rand(shape, generator=generator) * 2 - 1
    found = {"normal": normal * 0.02, "normal, rows of all sizes": normal * scales, "uniform": uniform}
    return {name: value.to(device, torch.bfloat16) for name, value in found.items()}


def differences(weight_OI: Tensor, nf4: NF4) -> Differences:
    """Compare one weight."""
    layout = nf4.layout(weight_OI.numel())
    kept = nf4.pack(weight_OI)
    codes, *parts = layout.parts(kept)
    theirs, state = functional.quantize_4bit(
        weight_OI, blocksize=layout.block, compress_statistics=layout.double, quant_type="nf4"
    )
    if layout.double:
        expected = [state.absmax, state.state2.absmax, state.offset.view(1)]
        assert state.state2.blocksize == GROUP
    else:
        expected = [state.absmax]
    other = codes ^ theirs.view(-1)
    room = torch.empty_like(weight_OI)
    nf4.unpack(kept, room)
    wide = functional.dequantize_4bit(theirs, state)
    return Differences(
        codes=int((other >> 4 != 0).sum() + (other & 15 != 0).sum()),
        absmax=sum(int((a != b.view(-1)).sum()) for a, b in zip(parts, expected, strict=True)),
        values=int((room.view(torch.int16) != wide.view(torch.int16)).sum()),
    )


def main() -> None:
    """Print a line for each setting and weight."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--values", type=int, default=10**7)
    parser.add_argument("--devices", nargs="*", default=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
    options = parser.parse_args()
    for device in map(torch.device, options.devices):
        for name, weight in weights(options.values + INPUTS, device).items():
            for block in (64, 128, 256, 512):
                for double in (True, False):
                    nf4 = NF4(NF4Options(block_size=block, double_quant=double))
                    found = differences(weight, nf4)
                    print(f"{device.type}, {name}, {weight.numel()} values, block {block}, double {double}: {found}")


if __name__ == "__main__":
    main()
