"""FP8 blocks: codes and scales against their definition, parts of blocks, and the kernel's bits on a GPU."""

from __future__ import annotations

import pytest
import torch
from surogate_quant_fp8 import FP8FormatOptions, surogate_weight_format
from surogate_quant_fp8.fp8 import CHUNK, E4M3, FP8, UNPACKER
from torch import Tensor

from surogate_testing import host_cuda


def values_of_e4m3() -> Tensor:
    """[127] float64: every number from 0 to 448, by the format's definition."""
    small = [m * 2.0**-9 for m in range(8)]
    return torch.tensor(
        small + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1], dtype=torch.float64
    )


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("shape", [(256, 128), (40, 200)], ids=str)
def test_each_weight_gets_a_nearest_code(shape: tuple[int, int], block: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape[0], 1, generator=generator))
    fp8 = FP8(FP8FormatOptions(block_size=block))
    codes, scales = fp8.parts(fp8.pack(x), *shape)
    table = values_of_e4m3()
    for p in range(scales.shape[0]):
        for q in range(scales.shape[1]):
            here = slice(p * block, (p + 1) * block), slice(q * block, (q + 1) * block)
            tile = x[here]
            assert scales[p, q].item() == (tile.abs().max() / 448).item()
            scaled = tile.double() / scales[p, q].double()
            nearest = (scaled.abs()[..., None] - table).abs().min(dim=-1).values
            found = (codes[here].double() - scaled).abs()
            # The quotient is rounded to fp32 first, which may move a value over a border it almost stands on.
            assert bool((found <= nearest + 1e-6 * scaled.abs()).all())
    room = torch.empty_like(x)
    fp8.unpack(fp8.pack(x), room)
    wide = scales.repeat_interleave(block, 0)[: shape[0]].repeat_interleave(block, 1)[:, : shape[1]]
    assert torch.equal(room, codes.float() * wide)


def test_bytes_of_a_large_weight() -> None:
    assert FP8(FP8FormatOptions()).nbytes(4096, 4096) * 8 / 4096**2 == pytest.approx(8.002, abs=1e-3)
    assert surogate_weight_format().build(FP8FormatOptions(block_size=32)).nbytes(32, 32) == 32 * 32 + 4
    assert not UNPACKER.takes(torch.empty(8, 8, dtype=torch.bfloat16))


def test_it_matters_not_how_much_is_worked_on_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(200, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    fp8 = FP8(FP8FormatOptions(block_size=32))
    kept, room, again = fp8.pack(x), torch.empty_like(x), torch.empty_like(x)
    fp8.unpack(kept, room)
    monkeypatch.setitem(CHUNK, "cpu", 1)
    assert torch.equal(fp8.pack(x), kept)
    fp8.unpack(kept, again)
    assert torch.equal(room, again)


@pytest.mark.parametrize("shape", [(1, 8), (5, 72), (40, 520)], ids=str)
def test_the_kernel_on_a_host_has_the_bits_of_the_reference(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    host_cuda.unpacks_on_host(UNPACKER, monkeypatch)
    for block in (32, 128):
        fp8 = FP8(FP8FormatOptions(block_size=block))
        host_cuda.ensure_kernel_unpacks(fp8, shape, fp8.unpack_reference)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [32, 128, 256])
@pytest.mark.parametrize("shape", [(1, 8), (3, 72), (257, 4096), (96, 12288), (130, 2056)], ids=str)
def test_the_kernel_has_the_bits_of_the_reference(shape: tuple[int, int], block: int) -> None:
    fp8 = FP8(FP8FormatOptions(block_size=block))
    every = torch.arange(shape[0] * shape[1]).to(torch.uint8).view(E4M3).float().view(shape)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for name, weight in {"codes": every, "random": x, "huge": x * 1e38, "tiny": x * 1e-39, "zero": x * 0}.items():
        kept = fp8.pack(weight.bfloat16().cuda())
        panel = torch.full((shape[0] + 1, shape[1] + 64), 7.0, dtype=torch.bfloat16, device="cuda")
        room = panel[:-1, : shape[1]]
        assert UNPACKER.takes(room)
        fp8.unpack(kept, room)
        expected = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        fp8.unpack_reference(kept, expected)
        torch.testing.assert_close(room, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
        room.fill_(7.0)
        assert bool((panel == 7).all()), f"{name}: writes outside of the room"
