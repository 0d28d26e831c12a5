"""NF4: codes and absmax of bitsandbytes, double quantisation, odd sizes, and the kernel's bits on a GPU."""

from __future__ import annotations

import pytest
import torch
from surogate_quant_nf4 import NF4Options, surogate_weight_format
from surogate_quant_nf4.nf4 import CHUNK, NF4, UNPACKER, VALUES
from torch import Tensor

from surogate_core.plugin import adamw_8bit
from surogate_testing import host_cuda

PLAIN = NF4(NF4Options(double_quant=False))
NESTED = NF4(NF4Options())

# Recorded from bitsandbytes 0.50.2: quantize_4bit(weight(), blocksize=64, quant_type="nf4") on a CPU.
CODES = (
    "7e1c4600f12f22f0073a0f9f092901f45f65f10c140fef030e14ecdbddd84f002cfb301fbe5ff1ff2fec71d170e4d5fe"
    "08514419c0ffe204bfe020c00f11f008270fef020f4abef3ff4fed61e160f8e2ea1217006121be3e6f081c13ece8ff8e"
    "de41d160f8e1d8210a00b0135b0fdf010f7d6ff0ee0ff3fdf103bfc100f25eab"
)
ABSMAX = [1.0, 0.00099945068359375, 30.0, 9.98377799987793e-07]


def weight() -> Tensor:
    """[4, 64] in bf16, the rows of very different sizes."""
    steps = torch.arange(256, dtype=torch.float64)
    sizes = torch.tensor([1.0, 1e-3, 30.0, 1e-6], dtype=torch.float64).repeat_interleave(64)
    return (torch.sin(steps * steps) * sizes).view(4, 64).bfloat16()


def unpacked(kept: Tensor, like: Tensor, nf4: NF4) -> Tensor:
    room = torch.empty_like(like)
    nf4.unpack(kept, room)
    return room


def test_codes_and_absmax_are_those_of_bitsandbytes() -> None:
    codes, absmax = PLAIN.layout(256).parts(PLAIN.pack(weight()))
    assert codes.numpy().tobytes().hex() == CODES
    assert absmax.tolist() == ABSMAX


def test_any_weight_has_the_codes_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.bfloat16, torch.float32):
        x = (torch.randn(512, 1024, generator=generator) * torch.rand(512, 1, generator=generator)).to(dtype)
        for block in (64, 128, 256, 512):
            nf4 = NF4(NF4Options(block_size=block, double_quant=False))
            codes, absmax = nf4.layout(x.numel()).parts(nf4.pack(x))
            theirs, state = functional.quantize_4bit(x, blocksize=block, quant_type="nf4")
            assert torch.equal(codes, theirs.view(-1))
            assert torch.equal(absmax, state.absmax)
            assert torch.equal(unpacked(nf4.pack(x), x, nf4), functional.dequantize_4bit(theirs, state))


def test_each_value_gets_the_nearest_code_and_the_lower_in_the_middle() -> None:
    values = torch.tensor(VALUES)
    middles = (values[:-1] + values[1:]) / 2
    above = torch.nextafter(middles, torch.tensor(2.0))
    # The absmax is 1, so that nothing is rounded on the way.
    x = torch.cat((values, middles, above, torch.zeros(18))).view(1, 64)
    codes = PLAIN.layout(64).parts(PLAIN.pack(x))[0]
    numbers = torch.stack((codes >> 4, codes & 15), dim=1).view(-1).tolist()
    assert numbers == [*range(16), *range(15), *range(1, 16), *[7] * 18]


@pytest.mark.parametrize("block", [64, 128, 256, 512])
def test_double_quantisation_rounds_the_absmax_to_the_nearest_of_the_map(block: int) -> None:
    generator = torch.Generator().manual_seed(block)
    x = torch.randn(600, 128, generator=generator) * torch.exp(torch.randn(600, 1, generator=generator))
    nf4 = NF4(NF4Options(block_size=block))
    layout = nf4.layout(x.numel())
    codes, numbers, groups, offset = layout.parts(nf4.pack(x))
    plain = NF4(NF4Options(block_size=block, double_quant=False))
    plain_codes, absmax = plain.layout(x.numel()).parts(plain.pack(x))
    assert torch.equal(codes, plain_codes)
    assert offset.item() == absmax.mean().item()
    rest = (absmax - absmax.mean()).split(256)
    assert groups.tolist() == [part.abs().max().item() for part in rest]
    scaled = torch.cat([part * (1 / part.abs().max()) for part in rest])
    distances = (scaled[:, None] - adamw_8bit.dynamic_map(signed=True)).abs()
    chosen = distances.gather(1, numbers[:, None].long())[:, 0]
    assert torch.equal(chosen, distances.min(dim=1).values)
    expected = (
        adamw_8bit.dynamic_map(signed=True)[numbers.long()] * groups.repeat_interleave(256)[: layout.blocks] + offset
    )
    values = torch.tensor(VALUES)[torch.stack((codes >> 4, codes & 15), dim=1).view(-1).long()].view(-1, block)
    assert torch.equal(unpacked(nf4.pack(x), x, nf4), (values * expected[:, None]).view(x.shape))


def test_bytes_of_a_large_weight() -> None:
    count = 4096 * 4096
    assert PLAIN.nbytes(4096, 4096) * 8 / count == 4.5
    assert NESTED.nbytes(4096, 4096) * 8 / count == pytest.approx(4.127, abs=1e-3)
    wide = NF4(NF4Options(block_size=512))
    assert wide.nbytes(4096, 4096) < NESTED.nbytes(4096, 4096) < 0.26 * 2 * count


def test_it_matters_not_how_much_is_worked_on_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(96, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    kept = NESTED.pack(x)
    found = unpacked(kept, x, NESTED)
    monkeypatch.setitem(CHUNK, "cpu", 512)
    assert torch.equal(NESTED.pack(x), kept)
    assert torch.equal(unpacked(kept, x, NESTED), found)


def test_it_is_built_with_its_options() -> None:
    assert surogate_weight_format().build(NF4Options(block_size=256)).block == 256
    assert NESTED.note(torch.device("cpu")) is None
    assert not UNPACKER.takes(torch.empty(8, 8, dtype=torch.bfloat16))


def hostile(shape: tuple[int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    spoilt = x.clone()
    spoilt[0, 0], spoilt[-1, -1] = float("nan"), float("inf")
    return {"random": x, "huge": x * 1e38, "tiny": x * 1e-39, "zero": x * 0, "not finite": spoilt}


@pytest.mark.parametrize("shape", [(1, 8), (5, 72), (40, 520)], ids=str)
def test_the_kernel_on_a_host_has_the_bits_of_the_reference(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    host_cuda.unpacks_on_host(UNPACKER, monkeypatch)
    for nf4 in (PLAIN, NESTED):
        host_cuda.ensure_kernel_unpacks(nf4, shape, nf4.unpack_reference)


@pytest.mark.gpu
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("block", [64, 512])
@pytest.mark.parametrize("shape", [(1, 8), (3, 72), (257, 4096), (96, 12288), (5, 2560), (128, 2056)], ids=str)
def test_the_kernel_has_the_bits_of_the_reference(shape: tuple[int, int], block: int, double: bool) -> None:
    nf4 = NF4(NF4Options(block_size=block, double_quant=double))
    for name, x in hostile(shape).items():
        kept = nf4.pack(x.bfloat16().cuda())
        panel = torch.full((shape[0] + 1, shape[1] + 64), 7.0, dtype=torch.bfloat16, device="cuda")
        room = panel[:-1, : shape[1]]
        assert UNPACKER.takes(room)
        nf4.unpack(kept, room)
        expected = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        nf4.unpack_reference(kept, expected)
        torch.testing.assert_close(room, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
        room.fill_(7.0)
        assert bool((panel == 7).all()), f"{name}: writes outside of the room"
        on_cpu = torch.empty(shape, dtype=torch.bfloat16)
        nf4.unpack_reference(kept.cpu(), on_cpu)
        torch.testing.assert_close(
            on_cpu, expected.cpu(), rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
