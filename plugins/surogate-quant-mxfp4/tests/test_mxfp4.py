"""MXFP4 weights: codes and powers against their definition and transformers, and the kernel's bits on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from surogate_quant_mxfp4 import surogate_weight_format
from surogate_quant_mxfp4.mxfp4 import UNPACKER, MXFP4Format, parts_of
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from surogate_core.plugin import fp4
from surogate_testing import host_cuda

FORMAT = MXFP4Format()


def weight(outputs: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(outputs, inputs, generator=generator) * torch.exp(torch.randn(outputs, 1, generator=generator))


def unpacked(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    room = torch.empty(shape)
    FORMAT.unpack(packed, room)
    return room


def test_codes_and_powers_are_those_of_the_definition() -> None:
    x = weight(24, 64)
    codes, powers = parts_of(FORMAT.pack(x), 24, 64)
    blocks = x.view(24, 2, 32)
    expected = [[math.floor(math.log2(block.abs().max())) - 2 + 127 for block in row] for row in blocks]
    assert powers.tolist() == expected
    scaled = blocks / torch.ldexp(torch.ones(24, 2), powers.int() - 127)[..., None]
    table = fp4.values(torch.arange(16, dtype=torch.uint8))
    distance = (scaled.clamp(-6, 6)[..., None] - table).abs().min(dim=-1).values
    found = fp4.values(fp4.unpaired(codes)).view(24, 2, 32)
    assert torch.equal((scaled.clamp(-6, 6) - found).abs(), distance)


def test_checkpoints_are_adopted_with_transformers_values() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (40, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 255, (40, 3), generator=generator, dtype=torch.uint8)
    scales[:4] = torch.tensor([1, 100, 254])
    packed = FORMAT.adopt({"codes": blocks, "scales": scales})
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()
    assert torch.equal(unpacked(packed, (40, 96)), expected)
    assert torch.equal(FORMAT.adopt({"codes": blocks.flatten(1), "scales": scales}), packed)


def test_what_is_unpacked_packs_to_the_same_bits() -> None:
    """Unless its largest code has another exponent than 6 has."""
    x = weight(32, 96)
    x.view(32, 3, 32)[..., 0] = 6 * 2.0 ** torch.arange(-5, -2)
    first = FORMAT.pack(x)
    assert torch.equal(FORMAT.pack(unpacked(first, (32, 96))), first)


def test_bytes_of_a_large_weight() -> None:
    assert FORMAT.nbytes(4096, 4096) * 8 / 4096**2 == pytest.approx(4.25, abs=1e-4)
    spec = surogate_weight_format()
    assert spec.build(spec.options()).name == spec.name
    assert not UNPACKER.takes(torch.empty(8, 8, dtype=torch.bfloat16))


def test_it_matters_not_how_much_is_worked_on_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = weight(40, 72).bfloat16()
    kept, room, again = FORMAT.pack(x), torch.empty_like(x), torch.empty_like(x)
    FORMAT.unpack(kept, room)
    monkeypatch.setitem(fp4.CHUNK, "cpu", 1)
    assert torch.equal(FORMAT.pack(x), kept)
    FORMAT.unpack(kept, again)
    assert torch.equal(room, again)


@pytest.mark.parametrize("shape", [(1, 8), (5, 72), (40, 520)], ids=str)
def test_the_kernel_on_a_host_has_the_bits_of_the_reference(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    host_cuda.unpacks_on_host(UNPACKER, monkeypatch)
    host_cuda.ensure_kernel_unpacks(FORMAT, shape, FORMAT.unpack_reference)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 8), (3, 72), (257, 4096), (96, 12288), (130, 2056)], ids=str)
def test_the_kernel_has_the_bits_of_the_reference(shape: tuple[int, int]) -> None:
    x = weight(*shape)
    spoilt = x.clone()
    spoilt[0, 0] = torch.nan
    for name, value in {"random": x, "huge": x * 1e30, "tiny": x * 1e-38, "zero": x * 0, "NaN": spoilt}.items():
        kept = FORMAT.pack(value.bfloat16().cuda())
        panel = torch.full((shape[0] + 1, shape[1] + 64), 7.0, dtype=torch.bfloat16, device="cuda")
        room, expected = panel[:-1, : shape[1]], torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        assert UNPACKER.takes(room)
        FORMAT.unpack(kept, room)
        FORMAT.unpack_reference(kept, expected)
        assert torch.equal(room.view(torch.int16), expected.view(torch.int16)), name
        assert bool((panel[-1] == 7).all())
        assert bool((panel[:, shape[1] :] == 7).all())
