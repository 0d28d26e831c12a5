"""Codes, block scales and tensor scales bit for bit those of the reference on the CPU.

The kernels' source is run twice: compiled for the host, where there is a compiler for it, and on a GPU.
"""

from __future__ import annotations

from itertools import product

import pytest
import surogate_kernels_cuda
import torch
from surogate_kernels_cuda import nvfp4
from torch import Tensor

from surogate_core.plugin import nvfp4 as core_nvfp4
from surogate_core.service.kernels import KernelTable
from surogate_testing import host_cuda

FLAGS = (False, True)
OPERANDS = [
    *(core_nvfp4.Operand(square=True, four_over_six=f, transposed=t) for f, t in product(FLAGS, FLAGS)),
    *(
        core_nvfp4.Operand(four_over_six=f, transposed=t, rotated=r, salt=70)
        for f, t, r in product(FLAGS, FLAGS, FLAGS)
    ),
]
SEED = torch.tensor(-1_234_567, dtype=torch.int32)
CASES = [(how, seed) for how in OPERANDS for seed in ((None,) if how.square else (None, SEED))]


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return host_cuda.device_for(request.param, nvfp4, "nvfp4", surogate_kernels_cuda.unavailable, monkeypatch)


def hostile(rows: int, inner: int, seed: int = 0) -> Tensor:
    """Values of many sizes, ties, zero blocks, signed zeros, subnormals, and blocks that four and six hold alike."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inner, generator=generator)
    x *= torch.exp2(torch.randint(-12, 6, (rows, 1), generator=generator).float())
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0])
    x[1, :16], x[2, :16] = ties, ties / 6 * 4
    x[:16, 16:32] = 0
    x[16, 16:32] = -0.0
    x[17, :16] = 1e-45
    x[18, :16] = torch.tensor([1e-38, -1e-40] * 8)
    x[19, :16] = torch.tensor([6.0, 3.0] * 8)
    x[20, :16] = torch.tensor([6.0, *[4.5] * 15])
    x[21:23] = torch.randint(-12, 13, (2, inner), generator=generator).float() / 2
    return x


def assert_same_bits(x: Tensor, how: core_nvfp4.Operand, seed: Tensor | None, device: torch.device) -> None:
    """`x` and `seed` are on the CPU."""
    there = x.to(device), None if seed is None else seed.to(device), how
    codes, scales, decode = (t.cpu() for t in nvfp4.nvfp4_quantised(*there))
    values, decode_again = (t.cpu() for t in nvfp4.nvfp4_rounded(*there))
    expected = core_nvfp4.nvfp4_quantised(x, seed, how)
    expected_values, _ = core_nvfp4.nvfp4_rounded(x, seed, how)
    assert [t.shape for t in (codes, scales, decode)] == [t.shape for t in expected]
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales.view(torch.uint8), expected[1].view(torch.uint8))
    assert torch.equal(decode.nan_to_num(-1), expected[2].nan_to_num(-1))
    assert torch.equal(decode.nan_to_num(-1), decode_again.nan_to_num(-1))
    assert values.shape == expected_values.shape
    bits = [torch.where(v.isnan(), torch.nan, v).view(torch.int16) for v in (values, expected_values)]
    assert torch.equal(*bits)


@pytest.mark.parametrize(("how", "seed"), CASES, ids=str)
def test_bits(how: core_nvfp4.Operand, seed: Tensor | None, device: torch.device) -> None:
    assert_same_bits(hostile(32, 48), how, seed, device)


@pytest.mark.parametrize("how", [OPERANDS[1], OPERANDS[3], OPERANDS[4], OPERANDS[-1]], ids=str)
@pytest.mark.parametrize("special", ["zero", "inf", "nan", "subnormal", "huge", "odd", "bfloat16", "strided"])
def test_bits_of_special_tensors(how: core_nvfp4.Operand, special: str, device: torch.device) -> None:
    x = hostile(32, 48, seed=1)
    if special == "zero":
        x = x * 0
    elif special in ("inf", "nan"):
        x[3, 7], x[9, 9] = float(special), -float(special)
    elif special == "subnormal":
        x = x * 1e-40
    elif special == "huge":
        x = x.clamp(-1, 1) * 3e38
    elif special == "odd":
        x = x[:31, :37].contiguous()
    elif special == "strided":
        x = torch.stack((x, x * 3))[:, :, 3:40].transpose(0, 1).flatten(0, 1)[::2]
    else:
        x = x.to(getattr(torch, special))
    seed = None if how.square or special == "odd" else SEED
    assert_same_bits(x, how, seed, device)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "seed"), CASES, ids=str)
def test_bits_of_a_million_values(how: core_nvfp4.Operand, seed: Tensor | None, device: torch.device) -> None:
    # On the host a launch of this size would take a minute.
    side = 1024 if device.type == "cuda" else 256
    x = hostile(side, side, seed=2)
    assert_same_bits(x, how, seed, device)
    assert_same_bits(x.bfloat16(), how, seed, device)


@pytest.mark.slow
def test_stochastic_rounding_is_unbiased(device: torch.device) -> None:
    """The mean error of ten million draws, a million on the host, is within four of its standard deviations."""
    x = torch.rand(2048, 4896 if device.type == "cuda" else 512, generator=torch.Generator().manual_seed(0)) * 12 - 6
    how = core_nvfp4.Operand(salt=9)
    codes, scales, decode = nvfp4.nvfp4_quantised(x.to(device), SEED.to(device), how)
    values, _ = nvfp4.nvfp4_rounded(x.to(device), SEED.to(device), how)
    unit = (scales.double() * decode.double()).repeat_interleave(16, 1)
    wide = x.to(device).double()
    ratio = (wide / unit).abs().clamp(max=6)
    step = torch.where(ratio < 2, 0.5, torch.where(ratio < 4, 1.0, 2.0))
    share = (ratio / step) % 1
    deviation = (share * (1 - share) * (step * unit).square()).sum().sqrt()
    inside = (wide / unit).abs() <= 6
    error = torch.where(inside, values.double() * decode.double() - wide, 0.0)
    assert error.sum().abs() < 4 * deviation
    assert codes.numel() * 2 == x.numel()


@pytest.mark.gpu
def test_equal_bits_in_a_graph_and_beside_another_stream() -> None:
    device = torch.device("cuda")
    reason = surogate_kernels_cuda.unavailable(device)
    if reason is not None:
        pytest.skip(reason)
    x, seed = hostile(512, 768, seed=3).cuda(), SEED.cuda()
    how = core_nvfp4.Operand(transposed=True, rotated=True, salt=3)
    first = nvfp4.nvfp4_quantised(x, seed, how)
    load, other = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(other):
            load @ load
        again = nvfp4.nvfp4_quantised(x, seed, how)
        assert all(
            torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
            for a, b in zip(first, again, strict=True)
        )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = nvfp4.nvfp4_quantised(x, seed, how)
    for _ in range(2):
        captured[0].zero_()
        graph.replay()
        assert torch.equal(captured[0], first[0])
    # Another seed in the same memory is read by the same graph.
    seed.add_(1)
    graph.replay()
    assert not torch.equal(captured[0], first[0])
    assert torch.equal(captured[0], nvfp4.nvfp4_quantised(x, seed, how)[0])


def test_they_are_chosen_on_a_gpu() -> None:
    kernels = {kernel.op: kernel for kernel in nvfp4.kernels()}
    assert kernels.keys() == {"nvfp4_quantised", "nvfp4_rounded"}
    for kernel in kernels.values():
        assert kernel.supports(torch.device("cuda"), torch.bfloat16)
        assert not kernel.supports(torch.device("cpu"), torch.bfloat16)
        assert not kernel.supports(torch.device("cuda"), torch.float16)
        table = KernelTable(device=torch.device("cuda"), kernels=(kernel,))
        assert table.offers(kernel.op, torch.float32)
