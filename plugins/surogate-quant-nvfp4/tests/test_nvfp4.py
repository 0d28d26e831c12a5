"""NVFP4 weights: codes and scales against their definition, four-over-six, and the kernel's bits on a GPU."""

from __future__ import annotations

import pytest
import torch
from surogate_quant_nvfp4 import NVFP4FormatOptions, surogate_weight_format
from surogate_quant_nvfp4.nvfp4 import UNPACKER, NVFP4Format, parts_of
from torch import Tensor

from surogate_core.plugin import fp4
from surogate_testing import host_cuda

SIX = NVFP4Format(NVFP4FormatOptions(four_over_six=False))
FOUR = NVFP4Format(NVFP4FormatOptions())


def weight(outputs: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(outputs, inputs, generator=generator) * torch.exp(torch.randn(outputs, 1, generator=generator))


def test_codes_and_scales_are_those_of_the_definition() -> None:
    x = weight(24, 64)
    codes, scales, decode = parts_of(SIX.pack(x), 24, 64)
    s_enc = torch.tensor(448.0 * 6) / x.abs().amax()
    assert decode.item() == (1 / s_enc).item()
    amax = x.view(24, 4, 16).abs().amax(-1)
    assert torch.equal(scales.float(), (amax * s_enc / 6).to(torch.float8_e4m3fn).float())
    scaled = x.view(24, 4, 16) / (scales.float() * decode)[..., None]
    table = fp4.values(torch.arange(16, dtype=torch.uint8))
    distance = (scaled.clamp(-6, 6)[..., None] - table).abs().min(dim=-1).values
    found = fp4.values(fp4.unpaired(codes)).view(24, 4, 16)
    assert torch.equal((scaled.clamp(-6, 6) - found).abs(), distance)
    room = torch.empty_like(x)
    SIX.unpack(SIX.pack(x), room)
    assert torch.equal(room, (found * scales.float()[..., None] * decode).view(24, 64))


def test_four_over_six_never_has_the_larger_error() -> None:
    x = weight(32, 128)
    kept = FOUR.pack(x)
    room = torch.empty_like(x)
    FOUR.unpack(kept, room)
    errors = (room - x).view(32, 8, 16).double().square().sum(-1)
    s_enc = torch.tensor(1536.0) / x.abs().amax()
    tiles = x.view(32, 8, 16)
    _, chosen, _ = parts_of(kept, 32, 128)
    of_four = 0
    for factor in (1.0, 1.5):
        scales = (tiles.abs().amax(-1) / 6 * s_enc * factor).to(torch.float8_e4m3fn).float()
        wide = (scales / s_enc)[..., None]
        other = (fp4.values(fp4.encode(tiles / wide)) * wide - tiles).double().square().sum(-1)
        assert bool((errors <= other * (1 + 1e-5)).all())
        of_four += int((chosen.float() == scales).sum()) if factor == 1.5 else 0
    assert 0 < of_four < 256


def test_searched_scales_have_the_smallest_error_of_all_near_ones() -> None:
    x = weight(24, 64)
    kept = NVFP4Format(NVFP4FormatOptions(search_scales=True)).pack(x)
    codes, scales, decode = parts_of(kept, 24, 64)
    tiles = x.view(24, 4, 16)
    wide = (scales.float() * decode)[..., None]
    assert torch.equal(fp4.unpaired(codes).view(24, 4, 16), fp4.encode(tiles / wide))
    room = torch.empty_like(x)
    SIX.unpack(kept, room)
    errors = (room - x).view(24, 4, 16).double().square().sum(-1)
    usual = (tiles.abs().amax(-1) / 6 / decode).to(torch.float8_e4m3fn).view(torch.uint8)
    offsets = set()
    for step in range(-4, 7):
        other = (usual.int() + step).to(torch.uint8).view(torch.float8_e4m3fn).float()
        at = (other * decode)[..., None]
        error = (fp4.values(fp4.encode(tiles / at)) * at - tiles).double().square().sum(-1)
        assert bool((errors <= error * (1 + 1e-5)).all())
        offsets |= {step} if bool((other == scales.float()).any()) else set()
    assert min(offsets) < 0 < max(offsets), "some blocks clip, and some leave room"
    again = torch.empty_like(x)
    FOUR.unpack(FOUR.pack(x), again)
    assert float((room - x).square().sum()) < 0.95 * float((again - x).square().sum())


def test_bytes_of_a_large_weight() -> None:
    assert FOUR.nbytes(4096, 4096) * 8 / 4096**2 == pytest.approx(4.5, abs=1e-4)
    assert not surogate_weight_format().build(NVFP4FormatOptions(four_over_six=False)).four_over_six
    assert not UNPACKER.takes(torch.empty(8, 8, dtype=torch.bfloat16))


def test_it_matters_not_how_much_is_worked_on_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = weight(40, 72).bfloat16()
    kept, room, again = FOUR.pack(x), torch.empty_like(x), torch.empty_like(x)
    search = NVFP4Format(NVFP4FormatOptions(search_scales=True))
    kept_by_search = search.pack(x)
    FOUR.unpack(kept, room)
    monkeypatch.setitem(fp4.CHUNK, "cpu", 1)
    assert torch.equal(FOUR.pack(x), kept)
    assert torch.equal(search.pack(x), kept_by_search)
    FOUR.unpack(kept, again)
    assert torch.equal(room, again)


@pytest.mark.parametrize("shape", [(1, 8), (5, 72), (40, 520)], ids=str)
def test_the_kernel_on_a_host_has_the_bits_of_the_reference(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    host_cuda.unpacks_on_host(UNPACKER, monkeypatch)
    host_cuda.ensure_kernel_unpacks(FOUR, shape, FOUR.unpack_reference)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 8), (3, 72), (257, 4096), (96, 12288), (130, 2056)], ids=str)
def test_the_kernel_has_the_bits_of_the_reference(shape: tuple[int, int]) -> None:
    x = weight(*shape)
    spoilt = x.clone()
    spoilt[0, 0] = torch.nan
    for name, value in {"random": x, "huge": x * 1e30, "tiny": x * 1e-38, "zero": x * 0, "NaN": spoilt}.items():
        kept = FOUR.pack(value.bfloat16().cuda())
        panel = torch.full((shape[0] + 1, shape[1] + 64), 7.0, dtype=torch.bfloat16, device="cuda")
        room = panel[:-1, : shape[1]]
        assert UNPACKER.takes(room)
        FOUR.unpack(kept, room)
        expected = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        FOUR.unpack_reference(kept, expected)
        torch.testing.assert_close(room, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
        room.fill_(7.0)
        assert bool((panel == 7).all()), f"{name}: writes outside of the room"
