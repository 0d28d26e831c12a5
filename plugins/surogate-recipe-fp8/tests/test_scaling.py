"""Scales and codes against transcriptions of their definitions, bit for bit."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
import torch
from surogate_recipe_fp8.gemm import FP8Hybrid, unpack
from surogate_recipe_fp8.rounding import rounded as rounded_by_recipe
from surogate_recipe_fp8.scaling import DelayedScaling
from torch import Tensor

from surogate_core.plugin import dsl, fp8

MILLION = 1_000_000
HOSTILE = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 2.0**-126, 2.0**-149, 448.0, 57344.0, fp8.FP32_MAX, -fp8.FP32_MAX]
RECIPE = FP8Hybrid(native=False, margin=0, history=1, note="")
SLOT = dsl.LinearSlot(name="q", module="q_proj", inputs=48, outputs=32, bias=False, region="qkv", adapter=None, index=0)


def magnitudes(format: torch.dtype) -> list[float]:
    """Every finite value ≥ 0 of a format in the order of its codes, from its definition (arXiv 2209.05433)."""
    exponent_bits, mantissa_bits, largest = (4, 3, fp8.E4M3_MAX) if format == fp8.E4M3 else (5, 2, fp8.E5M2_MAX)
    bias = 2 ** (exponent_bits - 1) - 1
    found = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            value = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
            if value <= largest:
                found.append(value)
    assert found[-1] == largest
    return found


def rounded(values: np.ndarray, format: torch.dtype) -> np.ndarray:
    """The code of each fp32 value: the nearest magnitude, of two the even code, saturated; the sign is the top bit."""
    table = np.array(magnitudes(format))
    size = np.minimum(np.abs(values).astype(np.float64), table[-1])
    above = np.searchsorted(table, size)
    below = np.maximum(above - 1, 0)
    to_below, to_above = size - table[below], table[above] - size
    take_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    codes = np.where(take_below, below, above)
    return np.where(np.signbit(values), codes | 0x80, codes).astype(np.uint8)


def hostile_values(format: torch.dtype) -> Tensor:
    """Random bits of fp32, random values of every size, each value of the format, each tie, and neighbours of ties."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (MILLION // 2,), generator=generator).to(torch.int32).view(torch.float32)
    sized = torch.randn(MILLION // 2, generator=generator) * torch.exp2(
        torch.randint(-24, 20, (MILLION // 2,), generator=generator).float()
    )
    table = torch.tensor(magnitudes(format))
    ties = (table[1:] + table[:-1]) / 2
    near = [torch.nextafter(ties, torch.tensor(to)) for to in (0.0, math.inf)]
    special = torch.tensor([*HOSTILE, math.inf, -math.inf])
    values = torch.cat([bits[~bits.isnan()], sized, table, -table, ties, -ties, *near, special])
    assert values.numel() > 0.99 * MILLION
    return values


@pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=str)
def test_codes(format: torch.dtype) -> None:
    values = hostile_values(format)
    codes = fp8.quantise(values, torch.tensor(1.0), format).view(torch.uint8).numpy()
    expected = rounded(values.numpy(), format)
    wrong = np.flatnonzero(codes != expected)
    assert not wrong.size, [(values[i].item(), codes[i], expected[i]) for i in wrong[:5]]


@pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=str)
def test_scaled_codes(format: torch.dtype) -> None:
    """The product with the scale is rounded to fp32 first."""
    values, scale = hostile_values(format), np.float32(37.77)
    codes = fp8.quantise(values, torch.tensor(scale), format).view(torch.uint8).numpy()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(codes, rounded(values.numpy() * scale, format))


@pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=str)
def test_nan_stays(format: torch.dtype) -> None:
    codes = fp8.quantise(torch.tensor([math.nan, 1.0]), torch.tensor(1.0), format).float()
    assert codes[0].isnan()
    assert codes[1] == 1


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("limit", [fp8.E4M3_MAX, fp8.E5M2_MAX])
def test_scales(limit: float, margin: int) -> None:
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(0, 2**31, (MILLION,), generator=generator).to(torch.int32).view(torch.float32)
    amax = torch.cat([bits, torch.tensor([abs(v) for v in HOSTILE] + [math.inf, math.nan])])
    old = np.float32(0.125)
    scales = fp8.scale_of(amax, limit, margin=margin, old=torch.tensor(old)).numpy()
    with np.errstate(all="ignore"):
        found = np.float32(limit) / amax.numpy() / np.float32(2**margin)
    keep = (amax.numpy() == 0) | ~np.isfinite(amax.numpy())
    expected = np.where(keep, old, np.where(np.isinf(found), np.float32(fp8.FP32_MAX), found))
    np.testing.assert_array_equal(scales.view(np.int32), expected.astype(np.float32).view(np.int32))
    assert np.isfinite(scales).all()


def one_scale(history: deque[float], new: float, skip: bool, old: float, limit: float) -> float:
    """One step of one scale, written out; the history is changed."""
    if skip:
        return old
    history.append(new if math.isfinite(new) else 0.0)
    largest = max(history)
    if not math.isfinite(new) or largest == 0:
        return old
    with np.errstate(over="ignore"):
        found = np.float32(limit) / np.float32(largest)
    return float(fp8.FP32_MAX if np.isinf(found) else found)


def test_a_ring_over_many_steps() -> None:
    slots, length = 3, 5
    scaling = DelayedScaling(slots, history=length, margin=0, device=torch.device("cpu"))
    histories = [[deque([0.0] * length, maxlen=length) for _ in range(3)] for _ in range(slots)]
    expected = torch.zeros(slots, 3)
    generator = torch.Generator().manual_seed(3)
    special = [0.0, math.inf, math.nan, 1e-45, fp8.FP32_MAX]
    for step in range(60):
        observed = torch.rand(slots, 3, generator=generator) * 10.0 ** (step % 7 - 3)
        if step % 4 == 1:
            observed[step % slots, step % 3] = special[step % len(special)]
        skip = step % 9 == 5
        scaling.update(observed, torch.tensor(float(skip)))
        for slot in range(slots):
            for role, limit in enumerate((fp8.E4M3_MAX, fp8.E4M3_MAX, fp8.E5M2_MAX)):
                old, new = expected[slot, role].item(), observed[slot, role].item()
                expected[slot, role] = one_scale(histories[slot][role], new, skip, old, limit)
        torch.testing.assert_close(scaling.rows, expected, rtol=0, atol=0)
    assert scaling.position.item() == sum(step % 9 != 5 for step in range(60)) % length


def test_the_update_is_in_place() -> None:
    """A captured graph and a checkpoint's loading write to the same memory."""
    scaling = DelayedScaling(2, history=4, margin=0, device=torch.device("cpu"))
    before = {name: tensor.data_ptr() for name, tensor in scaling.state().items()}
    scaling.update(torch.ones(2, 3), torch.tensor(0.0))
    assert {name: tensor.data_ptr() for name, tensor in scaling.state().items()} == before
    assert scaling.rows.tolist() == [[448, 448, 57344]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_weight_holds_both_layouts(dtype: torch.dtype) -> None:
    from surogate_recipe_fp8 import FP8Options

    options = FP8Hybrid.of(FP8Options(), "no FP8")
    weight = torch.randn(SLOT.outputs, SLOT.inputs, generator=torch.Generator().manual_seed(4)).to(dtype)
    packed = options.pack(weight, SLOT)
    codes_OI, codes_IO, inverse = unpack(packed, SLOT.outputs, SLOT.inputs)
    scale = np.float32(448) / weight.abs().max().float().numpy()
    assert inverse.item() == np.float32(1) / scale
    expected = rounded(weight.float().numpy() * scale, fp8.E4M3).reshape(weight.shape)
    np.testing.assert_array_equal(codes_OI.view(torch.uint8).numpy(), expected)
    np.testing.assert_array_equal(codes_IO.view(torch.uint8).numpy(), expected.T)
    assert packed.numel() == 16 + 2 * weight.numel()
    assert codes_OI.is_contiguous()
    assert codes_IO.is_contiguous()


def test_the_used_range_is_of_the_scales_before_the_update() -> None:
    state = DelayedScaling(1, history=2, margin=1, device=torch.device("cpu"))
    first = torch.tensor([[2.0, 4.0, 8.0]])
    assert state.used_range(first).tolist() == [[0.0, 0.0, 0.0]]
    state.update(first, torch.tensor(0.0))
    # A margin of 1 leaves room for twice the values of before.
    assert state.used_range(torch.tensor([[2.0, 8.0, 24.0]])).tolist() == [[0.5, 1.0, 1.5]]
    assert state.used_range(torch.tensor([[torch.inf, 0.0, torch.nan]])).isfinite().tolist() == [[False, True, False]]


def test_the_smallest_normal_numbers_are_those_of_the_formats() -> None:
    formats = DelayedScaling(1, history=1, margin=0, device=torch.device("cpu")).formats
    limits = {
        role: (torch.finfo(kind).tiny / torch.finfo(kind).max)
        for role, kind in zip(formats, (fp8.E4M3, fp8.E4M3, fp8.E5M2), strict=True)
    }
    assert formats == limits


@pytest.mark.parametrize(("role", "kind"), [("activation", fp8.E4M3), ("weight", fp8.E4M3), ("gradient", fp8.E5M2)])
def test_what_a_report_calls_rounded_is_what_the_formats_hold(role: str, kind: torch.dtype) -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[0] = 0
    values, beyond = rounded_by_recipe(x, role, RECIPE.margin)
    limit = magnitudes(kind)[-1]
    scale = np.float32(limit) / x.abs().max().numpy()
    codes = rounded((x * torch.tensor(scale)).numpy().ravel(), kind)
    expected = np.array(magnitudes(kind))[codes & 0x7F] * np.where(codes & 0x80, -1.0, 1.0)
    np.testing.assert_allclose(values.double().numpy().ravel(), expected / float(scale), rtol=1e-6)
    assert not beyond.any()
    assert not values[0].any()


def test_without_room_nothing_and_with_infinity_one_value_is_cut_off() -> None:
    x = torch.full((2, 16), 3.0)
    x[1, 3] = torch.inf
    values, beyond = rounded_by_recipe(x, "activation", RECIPE.margin)
    assert beyond.nonzero().tolist() == [[1, 3]]
    assert values[1, 3] == fp8.E4M3_MAX  # no scale can be made of infinity: 1
