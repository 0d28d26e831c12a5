"""AdamW of bf16 masters in one compiled pass, against its formulas in float64 and the random bits of the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.bundles import ParamGroup
from surogate_core.kernels.ops import random_bits
from surogate_core.kernels.optimizing import cpu_updates
from surogate_core.kernels.optimizing.rounding import PERIOD, SALTS, stochastic_bf16
from surogate_core.kernels.optimizing.updates import adamw_update
from surogate_core.kernels.registry import KernelTable, using

CPU = torch.device("cpu")
RATES: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8}
SIZES = [pytest.param(n, marks=() if n == 1000 else pytest.mark.slow) for n in (256, 1000, 4099)]


def group(n: int, *, scale: float = 1.0, seed: int = 0) -> ParamGroup:
    generator = torch.Generator().manual_seed(seed)
    return ParamGroup(
        name="g",
        master=torch.randn(n, generator=generator).bfloat16(),
        grad=torch.randn(n, generator=generator) * scale,
        shapes={"w": (0, (n,))},
        weight_decay=0.1,
        seed=torch.tensor(1234 + seed, dtype=torch.int32),
        number=1,
    )


def scalars(count: int, *, skip: float = 0.0) -> dict[str, Any]:
    return {
        "count": torch.tensor(float(count)),
        "lr": torch.tensor(1e-2),
        "clip": torch.tensor(0.5),
        "skip": torch.tensor(skip),
    }


def expected(g: ParamGroup, first: Tensor, second: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    gradient = g.grad.double() * 0.5
    m, v = first.double() * 0.9 + gradient * 0.1, second.double() * 0.99 + gradient**2 * 0.01
    wide = g.master.double() * (1 - 1e-2 * 0.1)
    wide -= 1e-2 * (m / (1 - 0.9**count)) / ((v / (1 - 0.99**count)).sqrt() + 1e-8)
    return wide, m, v


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("scale", [1.0, 0.0, 1e15, 1e-18])
def test_against_float64(scale: float, n: int) -> None:
    g = group(n, scale=scale)
    first, second = torch.zeros(n), torch.zeros(n)
    with torch.no_grad(), using(KernelTable.build(CPU, [cpu_updates.COMPILED_UPDATES])) as table:
        for count in (1, 2, 3):
            wide, m, v = expected(g, first, second, count)
            adamw_update(first, second, g, **scalars(count), **RATES)
            torch.testing.assert_close(first.double(), m, rtol=1e-6, atol=0)
            torch.testing.assert_close(second.double(), v, rtol=1e-6, atol=1e-44)
            # The bits decide alike but where the sum in fp32 is another one.
            rounded = stochastic_bf16(wide.float(), random_bits(wide.shape, g.seed, salt=SALTS))  # type: ignore[arg-type]
            assert (rounded != g.master).float().mean() < 5e-3
            assert ((g.master.double() - wide).abs() <= wide.abs() * 2**-7 + 1e-12).all()
    assert table.chosen == {("adamw_update", "float32"): "inductor"}


@pytest.mark.parametrize("first", [256, PERIOD - 1024, PERIOD + 512])
def test_a_part_of_a_group_has_the_random_bits_of_its_elements(first: int) -> None:
    g = replace(group(256), first=first)
    again = replace(g, master=g.master.clone())
    for each in (g, again):
        kernels = [cpu_updates.COMPILED_UPDATES] if each is g else []
        with torch.no_grad(), using(KernelTable.build(CPU, kernels)):
            adamw_update(torch.zeros(256), torch.zeros(256), each, **scalars(1), **RATES)
    assert (g.master != again.master).float().mean() < 1e-2


def test_a_skipped_step_changes_nothing_and_fp32_masters_are_left_to_torch() -> None:
    g = group(1000)
    g.grad[3] = float("nan")
    before, first, second = g.master.clone(), torch.zeros(1000), torch.zeros(1000)
    cpu_updates.adamw_update(first, second, g, **scalars(1, skip=1.0), **RATES)
    assert torch.equal(g.master, before)
    assert not first.any()
    assert not second.any()
    with torch.no_grad(), using(KernelTable.build(CPU, [cpu_updates.COMPILED_UPDATES])) as table:
        wide = ParamGroup(name="g", master=torch.ones(8), grad=torch.ones(8), shapes={}, weight_decay=0.0)
        adamw_update(first[:8], second[:8], wide, **scalars(1), **RATES)
    assert table.chosen == {("adamw_update", "float32"): "reference"}
