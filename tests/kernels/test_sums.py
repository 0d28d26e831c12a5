"""Sums by a binary tree, and their addition to a sum that exists."""

from __future__ import annotations

import pytest
import torch

from surogate_core.engine.ranks.reduce import reduce_parts, staging_elements
from surogate_core.kernels.registry import Kernel, KernelTable, using
from surogate_core.kernels.sums import add_tree_sum, tree_sum
from surogate_testing.virtual import VirtualFabric, in_threads


def drawn(count: int, length: int = 1000) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(length, generator=generator) * 10.0 ** (number % 3) for number in range(count)]


@pytest.mark.parametrize("count", range(1, 9))
def test_a_sum_is_rounded_before_it_is_added(count: int) -> None:
    parts, total = drawn(count), drawn(1)[0] * 100
    whole = torch.empty(1000)
    tree_sum([part.clone() for part in parts], whole)
    expected = torch.stack([total, *parts]).double().sum(0)
    wanted = total + whole
    add_tree_sum(total, [part.clone() for part in parts])
    assert torch.equal(total, wanted)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_reduction_adds_to_what_is_there(world: int) -> None:
    """As a reduction and an addition would, in one call of the run's kernel for each chunk."""
    calls: list[int] = []

    def counted(total_K: torch.Tensor, parts: list[torch.Tensor]) -> None:
        calls.append(len(parts))
        tree_sum(parts, parts[0])
        total_K.add_(parts[0])

    kernel = Kernel(op="add_tree_sum", name="counted", function=counted, supports=lambda device, dtype: True)

    def work(fabric: VirtualFabric) -> tuple[torch.Tensor, torch.Tensor]:
        values, staging = drawn(8)[fabric.rank], torch.empty(staging_elements(1000 // world, world))
        found, before = [], torch.arange(1000.0 // world)
        for onto in (False, True):
            parts = list(values.clone().split(1000 // world))
            out = before.clone() if onto else torch.full_like(before, torch.nan)
            with using(KernelTable(device=torch.device("cpu"), kernels=(kernel,))):
                reduce_parts(fabric, parts, staging, out=out, onto=onto)
            found.append(out if onto else before + out)
        return found[0], found[1]

    assert all(torch.equal(*found) for found in in_threads(world, work))
    assert set(calls) == ({world} if world > 1 else set())
