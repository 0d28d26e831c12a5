"""Codes and scales against a transcription of the formulas in plain Python, value by value."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from surogate_core.formats.fp4 import encode, pairs, unpaired, values
from surogate_core.formats.nvfp4 import (
    MINUS,
    Quantised,
    hadamard,
    quantise,
)
from surogate_core.kernels.ops import random_bits

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP32_MAX = np.finfo(np.float32).max
E4M3 = sorted(
    {(m / 8) * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)}
)
E4M3 = [v for v in E4M3 if v <= 448]
f = np.float32


def nearest(table: tuple[float, ...] | list[float], size: float) -> int:
    """Number of the nearest entry, of two the even one."""
    distances = [abs(size - entry) for entry in table]
    least = min(distances)
    return min((i for i, d in enumerate(distances) if d == least), key=lambda i: i % 2)


def e4m3(value: np.float32) -> np.float32:
    """A value ≥ 0 rounded to E4M3."""
    low = int(np.searchsorted(E4M3, float(value)))
    near = range(max(low - 1, 0), min(low + 1, len(E4M3) - 1) + 1)
    least = min(abs(float(value) - E4M3[i]) for i in near)
    return f(E4M3[min((i for i in near if abs(float(value) - E4M3[i]) == least), key=lambda i: i % 2)])


def e2m1(value: np.float32) -> int:
    code = nearest(GRID, min(abs(float(value)), 6.0))
    return code | 8 if np.signbit(value) else code


def hashed(x: int) -> int:
    """lowbias32."""
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def e2m1_stochastic(value: np.float32, uniform: float) -> int:
    """The upper neighbour where `uniform` in [0, 1) is below the distance from the lower one, in steps."""
    size = min(abs(float(value)), 6.0)
    lower = max(i for i, entry in enumerate(GRID) if entry <= size)
    if lower < 7:
        lower += uniform < (size - GRID[lower]) / (GRID[lower + 1] - GRID[lower])
    return lower | 8 if np.signbit(value) else lower


def encode_block(
    block: list[np.float32], scale: np.float32, decode: np.float32, uniform: list[float] | None = None
) -> list[int]:
    divisor = scale * decode
    ratios = [x / divisor if divisor != 0 else f(0) for x in block]
    if uniform is None:
        return [e2m1(ratio) for ratio in ratios]
    return [e2m1_stochastic(ratio, u) for ratio, u in zip(ratios, uniform, strict=True)]


def squared_error(block: list[np.float32], codes: list[int], scale: np.float32, decode: np.float32) -> float:
    signed = [-GRID[c & 7] if c & 8 else GRID[c] for c in codes]
    return math.fsum((q * float(scale) * float(decode) - float(x)) ** 2 for q, x in zip(signed, block, strict=True))


@np.errstate(all="ignore")
def transcribed(
    matrix: np.ndarray, *, square: bool, four_over_six: bool, key: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """(codes [R, K], block scales, 1 / s_enc), as the specification writes it; stochastic with a key."""
    rows, inner = matrix.shape
    height = 16 if square else 1
    amax = f(np.abs(matrix).max())
    top = f(1536 if four_over_six else 448 * 6)
    s_enc = f(1) if amax == 0 or np.isinf(amax) else min(top / amax, f(FP32_MAX))
    s_dec = f(1) / s_enc
    codes = np.zeros((rows, inner), dtype=np.uint8)
    scales = np.zeros((rows // height, inner // 16), dtype=np.float32)
    for r in range(rows // height):
        for k in range(inner // 16):
            window = (slice(r * height, (r + 1) * height), slice(k * 16, (k + 1) * 16))
            block = [f(x) for x in matrix[window].ravel()]
            uniform = None
            if key is not None:
                first = r * inner + k * 16
                uniform = [(hashed(n ^ key) >> 8) / 2**24 for n in range(first, first + 16)]
            amax_b = max(abs(x) for x in block)
            if four_over_six:
                unrounded = amax_b / f(6) * s_enc
                s6, s4 = (e4m3(min(unrounded * factor, f(448))) for factor in (f(1), f(1.5)))
                six, four = (encode_block(block, s, s_dec) for s in (s6, s4))
                better = squared_error(block, four, s4, s_dec) < squared_error(block, six, s6, s_dec)
                scale, chosen = (s4, four) if better else (s6, six)
            else:
                scale = e4m3(min(amax_b * s_enc / f(6), f(448)))
                chosen = encode_block(block, scale, s_dec)
            if uniform is not None:
                chosen = encode_block(block, scale, s_dec, uniform)
            codes[window] = np.array(chosen).reshape(height, 16)
            scales[r, k] = scale
    return codes, scales, s_dec


def hostile(rows: int, inner: int, seed: int = 0) -> Tensor:
    """Normal values of many sizes, zero blocks, ties, subnormals and signed zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inner, generator=generator)
    x *= torch.exp2(torch.randint(-12, 6, (rows, 1), generator=generator).float())
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0])
    x[1, :16], x[2, 16:32] = ties, ties / 6 * 4
    x[:16, 32:48] = 0
    x[16, 48:64] = -0.0
    x[17, :16] = 1e-45
    x[18, :16] = torch.tensor([1e-38, -1e-40] * 8)
    return x


def assert_transcribed(x: Tensor, *, square: bool, four_over_six: bool, stochastic: bool = False) -> None:
    seed, salt = -5, 3
    bits = random_bits(x.shape, torch.tensor(seed, dtype=torch.int32), salt=salt) if stochastic else None
    key = hashed((seed + salt * 0x1E3779B9) & 0xFFFFFFFF) if stochastic else None
    found = quantise(x, square=square, four_over_six=four_over_six, bits=bits)
    codes, scales, decode = transcribed(x.numpy(), square=square, four_over_six=four_over_six, key=key)
    assert found.decode.item() == decode
    np.testing.assert_array_equal(found.scales.float().numpy(), scales)
    # In a block whose scale is 0 every value is 0, and signs of zeros say nothing.
    expected = np.where(codes == 8, 0, codes)
    np.testing.assert_array_equal(torch.where(found.codes == 8, 0, found.codes).numpy(), expected)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("four_over_six", [False, True])
def test_codes_and_scales(square: bool, four_over_six: bool) -> None:
    assert_transcribed(hostile(32, 96), square=square, four_over_six=four_over_six)


@pytest.mark.parametrize("four_over_six", [False, True])
def test_stochastic_codes(four_over_six: bool) -> None:
    assert_transcribed(hostile(32, 96), square=False, four_over_six=four_over_six, stochastic=True)


@pytest.mark.parametrize("scale", [1e-45, 1e-39, 1e-35, 1e30])
def test_tensors_of_extreme_size(scale: float) -> None:
    assert_transcribed(
        torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) * scale, square=False, four_over_six=False
    )


def test_empty_and_infinite_tensors() -> None:
    assert_transcribed(torch.zeros(16, 16), square=True, four_over_six=True)
    x = torch.randn(16, 32)
    x[0, 0] = torch.inf
    found = quantise(x, square=False, four_over_six=False)
    assert found.decode.item() == 1
    assert found.blocks(16, 32).isfinite().all()
    assert_transcribed(x, square=False, four_over_six=False)
    assert_transcribed(-x, square=True, four_over_six=True)
    x[0, 0] = torch.nan
    found = quantise(x, square=False, four_over_six=False)
    assert (found.blocks(16, 32) * found.decode).isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize(("square", "stochastic"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("four_over_six", [False, True])
def test_a_million_codes_and_scales(square: bool, stochastic: bool, four_over_six: bool) -> None:
    x = hostile(1024, 1024, seed=5)
    assert_transcribed(x, square=square, four_over_six=four_over_six, stochastic=stochastic)


def test_every_value_has_its_code() -> None:
    table = torch.tensor([*GRID, *(-v for v in GRID)])
    codes = encode(table)
    assert codes.tolist() == list(range(16))
    assert torch.equal(values(codes), table)
    assert torch.equal(torch.signbit(values(codes)), torch.signbit(table))


def test_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert values(encode(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert values(encode(-ties)).tolist() == [0, -1, -1, -2, -2, -4, -4]
    above, below = (values(encode(torch.nextafter(ties, torch.tensor(to)))).tolist() for to in (9.0, 0.0))
    assert above == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert below == [0, 0.5, 1, 1.5, 2, 3, 4]


def mean_error_in_deviations(draws: int) -> float:
    """|mean error| of stochastic rounding over its standard deviation, of values over the whole range."""
    x = torch.rand(draws, generator=torch.Generator().manual_seed(0)) * 12 - 6
    bits = random_bits(x.shape, torch.tensor(7, dtype=torch.int32), salt=3)
    error = values(encode(x, bits)).double() - x.double()
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0)).double()
    share = (x.abs().double() / step) % 1
    deviation = (share * (1 - share) * step.square()).sum().sqrt()
    return float(error.sum().abs() / deviation)


def test_stochastic_rounding_is_unbiased() -> None:
    assert mean_error_in_deviations(100_000) < 4


@pytest.mark.slow
def test_stochastic_rounding_is_unbiased_over_many_draws() -> None:
    assert mean_error_in_deviations(10_000_000) < 4


def test_stochastic_rounding_of_each_value_is_unbiased() -> None:
    """At one point: the share of draws that go up is the distance from the lower neighbour."""
    draws = 40_000
    for value in (0.1, -0.3, 1.1, 2.7, -4.5, 5.9):
        x = torch.full((draws,), value)
        rounded = values(encode(x, random_bits(x.shape, torch.tensor(1, dtype=torch.int32), salt=0)))
        lower, upper = rounded.min().item(), rounded.max().item()
        assert {lower, upper} == set(rounded.unique().tolist())
        share = (value - lower) / (upper - lower)
        sigma = math.sqrt(share * (1 - share) / draws)
        assert abs((rounded == upper).double().mean().item() - share) < 4 * sigma


def test_stochastic_rounding_is_replayable() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    codes = [
        quantise(
            x, square=False, four_over_six=True, bits=random_bits(x.shape, torch.tensor(s, dtype=torch.int32), salt=1)
        ).codes
        for s in (5, 5, 6)
    ]
    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])


def test_values_of_the_grid_are_not_moved_by_random_bits() -> None:
    x = torch.tensor(GRID).repeat(100)
    assert torch.equal(values(encode(x, random_bits(x.shape, torch.tensor(1, dtype=torch.int32), salt=0))), x)


def sylvester() -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def test_hadamard_is_the_matrix_of_the_specification() -> None:
    signs = [1 if s == "+" else -1 for s in "+++-+------+-+--"]
    assert [i for i, s in enumerate(signs) if s < 0] == list(MINUS)
    matrix = torch.diag(torch.tensor(signs).double()) @ sylvester() / 4
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    expected = (x.double().view(-1, 16) @ matrix).view(5, 48)
    torch.testing.assert_close(hadamard(x).double(), expected, rtol=1e-5, atol=1e-6)
    back = (hadamard(x).double().view(-1, 16) @ matrix.t()).view(5, 48)
    torch.testing.assert_close(back, x.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(16).double(), rtol=0, atol=1e-15)


def test_hadamard_of_both_operands_leaves_their_product() -> None:
    a, b = (torch.randn(n, 40, generator=torch.Generator().manual_seed(n)) for n in (3, 4))
    torch.testing.assert_close(hadamard(a) @ hadamard(b).t(), a @ b.t(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("four_over_six", [False, True])
def test_a_weight_and_its_transpose_dequantise_alike(four_over_six: bool) -> None:
    w = hostile(32, 96)
    one = quantise(w, square=True, four_over_six=four_over_six)
    other = quantise(w.t(), square=True, four_over_six=four_over_six)
    assert torch.equal(one.blocks(32, 96) * one.decode, (other.blocks(96, 32) * other.decode).t())
    assert torch.equal(one.t().blocks(96, 32), one.blocks(32, 96).t())


def test_four_only_where_it_is_strictly_better() -> None:
    """Six holds 6, 3 and 0 without error, and four too would: then six. Where 5 of 6 is needed, four is nearer."""
    tied = torch.tensor([6.0, 3.0, *[0.0] * 14])
    better = torch.tensor([6.0, *[4.5] * 15])
    both = torch.stack((tied, better)) * 256
    found = quantise(both, square=False, four_over_six=True)
    unrounded = 256.0
    assert found.decode.item() == 1
    assert found.scales.float().flatten().tolist() == [unrounded, unrounded * 1.5]
    dequantised = found.blocks(2, 16) * found.decode
    assert torch.equal(dequantised, torch.stack((tied, better)) * 256)


def dequantised(found: Quantised, x: Tensor) -> Tensor:
    return found.blocks(*x.shape[-2:]).double() * found.decode.double()


@pytest.mark.parametrize("square", [False, True])
def test_searched_scales_are_never_worse(square: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    for x in (torch.randn(40, 56, generator=generator), hostile(48, 64)):
        x = torch.where(x.isfinite(), x, 1.0)
        found = quantise(x, square=square, four_over_six=True, search=True)
        usual = quantise(x, square=square, four_over_six=True)
        assert torch.equal(found.decode, usual.decode)
        errors = [(dequantised(one, x) - x.double()).square() for one in (found, usual)]
        height = 16 if square else 1
        rows, columns = (len(x) // height * height), x.shape[1] // 16 * 16
        blocks = [e[:rows, :columns].view(rows // height, height, -1, 16).sum((1, 3)) for e in errors]
        assert bool((blocks[0] <= blocks[1] * (1 + 1e-9)).all())
        assert float(errors[0].sum()) < float(errors[1].sum())


@pytest.mark.parametrize("square", [False, True])
def test_each_of_several_matrices_is_searched_alone(square: bool) -> None:
    x = (
        torch.randn(3, 32, 48, generator=torch.Generator().manual_seed(6))
        * torch.tensor([1.0, 9.0, 0.1])[:, None, None]
    )
    found = quantise(x, square=square, four_over_six=True, search=True)
    for number, matrix in enumerate(x):
        alone = quantise(matrix, square=square, four_over_six=True, search=True)
        assert torch.equal(found.codes[number], alone.codes)
        assert torch.equal(found.scales[number].float(), alone.scales.float())
        assert torch.equal(found.decode[number], alone.decode)


def test_search_keeps_zeros_and_spoilt_values() -> None:
    x = torch.zeros(16, 32)
    assert not quantise(x, square=False, four_over_six=True, search=True).codes.any()
    x[0, 0], x[3, 20] = torch.nan, 1.0
    found = quantise(x, square=False, four_over_six=True, search=True)
    assert dequantised(found, x)[0, 0].isnan()


def test_sides_that_are_no_multiples_of_sixteen() -> None:
    x = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    for square in (False, True):
        found = quantise(x, square=square, four_over_six=False)
        whole = quantise(torch.nn.functional.pad(x, (0, 2, 0, 12)), square=square, four_over_six=False)
        assert torch.equal(found.blocks(20, 30), whole.blocks(32, 32)[:20, :30])


def test_packed_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).view(2, 16)
    packed = pairs(codes)
    assert packed[0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(unpaired(packed), codes)
    assert Quantised(codes, torch.ones(2, 1).to(torch.float8_e4m3fn), torch.tensor(1.0)).blocks(2, 16)[0, 1] == 0.5
