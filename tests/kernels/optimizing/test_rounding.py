"""Stochastic rounding of bf16 masters: the neighbours, their mean, what stays as it is, and replay in any pieces."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surogate_core.bundles import ParamGroup
from surogate_core.kernels.ops import random_bits
from surogate_core.kernels.optimizing.rounding import stochastic_bf16, write_master


def bits(count: int, seed: int = 0) -> Tensor:
    return random_bits(torch.Size((count,)), torch.tensor(seed, dtype=torch.int32), salt=0)


def make_group(size: int, dtype: torch.dtype = torch.bfloat16, *, number: int = 0) -> ParamGroup:
    seed = None if dtype == torch.float32 else torch.tensor(5, dtype=torch.int32)
    master, grad = torch.zeros(size, dtype=dtype), torch.zeros(size)
    return ParamGroup(
        name="g", master=master, grad=grad, shapes={"w": (0, (size,))}, weight_decay=0.0, seed=seed, number=number
    )


def test_every_value_becomes_one_of_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (100_000,), generator=generator, dtype=torch.int32)
    x = patterns.view(torch.float32)
    x = x[x.isfinite() & (x.abs() < 3e38)]
    low = (x.view(torch.int32) & -0x10000).view(torch.float32)
    high = torch.where(low == x, low, ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32))
    found = stochastic_bf16(x, bits(len(x))).float()
    assert bool(((found == low) | (found == high)).all())
    assert 0.45 < float((found == low).float().mean()) < 0.55


@pytest.mark.parametrize("value", [1.0 + 2**-9, -3.7, 1e-3, 2.0**-127 * 1.3, 1 + 127 / 128 + 3 / 1024])
def test_the_mean_is_the_value(value: float) -> None:
    """Over a million draws, to 4 standard errors; rounded to nearest the first would be off by a quarter of a step."""
    x = torch.full((1_000_000,), value)
    found = stochastic_bf16(x, bits(len(x))).double()
    steps = found.unique()
    assert len(steps) == 2
    step = float(steps[1] - steps[0])
    fraction = (float(x[0]) - float(steps[0])) / step
    error = abs(float(found.mean()) - float(x[0])) / step
    assert error < 4 * math.sqrt(fraction * (1 - fraction) / len(x)) + 2**-16


def test_what_bf16_holds_and_what_is_not_finite_stays() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for seed in range(4):
        found = stochastic_bf16(every.float(), bits(len(every), seed))
        assert torch.equal(found.isnan(), every.isnan())
        assert torch.equal(found[~every.isnan()].view(torch.int16), every[~every.isnan()].view(torch.int16))
    nan = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert bool(stochastic_bf16(nan, torch.full((3,), -1, dtype=torch.int32)).isnan().all())


def test_writing_in_other_pieces_gives_the_same_bits() -> None:
    value = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    whole, parts = make_group(4096), make_group(4096)
    write_master(whole, 0, value)
    for start, stop in ((2048, 4096), (0, 256), (256, 2048)):
        write_master(parts, start, value[start:stop].view(-1, 256))
    assert torch.equal(whole.master, parts.master)
    assert not torch.equal(whole.master, value.bfloat16())


def test_groups_and_steps_draw_other_numbers() -> None:
    value = torch.full((4096,), 1 + 2**-9)
    found = []
    for number, seed in ((0, 5), (1, 5), (0, 6)):
        group = make_group(4096, number=number)
        assert group.seed is not None
        group.seed.fill_(seed)
        write_master(group, 0, value)
        found.append(group.master)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        agree = float((found[a] == found[b]).float().mean())
        assert 0.55 < agree < 0.7, "(1/4)² + (3/4)² of independent draws"


def test_random_bits_are_counted_from_any_element() -> None:
    seed = torch.tensor(5, dtype=torch.int32)
    border = 1 << 30
    whole = random_bits(torch.Size((8,)), seed, salt=0, first=border - 4)
    halves = [random_bits(torch.Size((4,)), seed, salt=0, first=border + n) for n in (-4, 0)]
    assert torch.equal(whole, torch.cat(halves))


def test_fp32_masters_are_copied_to() -> None:
    group = make_group(256, torch.float32)
    value = torch.randn(128)
    write_master(group, 64, value)
    assert torch.equal(group.master[64:192], value)
    assert group.master[:64].abs().sum() == group.master[192:].abs().sum() == 0
