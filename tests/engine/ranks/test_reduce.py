"""Sums over ranks: the right ones, in tree order, whatever the lengths and the chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.bundles.fabrics import Fabric
from surogate_core.engine.ranks.reduce import CHUNK, reduce_parts, staging_elements
from surogate_core.kernels.sums import tree_sum
from surogate_testing.virtual import in_threads


def _values(rank: int, elements: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank))


def _reduced(world: int, lengths: list[int], staging: int, *, apart: bool = False) -> list[Tensor]:
    """Each rank's sums: in its flat tensor, or in a tensor apart."""

    def work(fabric: Fabric) -> Tensor:
        flat = _values(fabric.rank, sum(lengths))
        before = flat.clone()
        parts = flat.split(lengths)
        out = torch.full_like(parts[fabric.rank], float("nan")) if apart else None
        reduce_parts(fabric, parts, torch.empty(staging), out=out)
        sent = [(part, whole) for part, whole in zip(parts, before.split(lengths), strict=True)]
        assert all(torch.equal(part, whole) for r, (part, whole) in enumerate(sent) if r != fabric.rank)
        return (parts[fabric.rank] if out is None else out).clone()

    return in_threads(world, work)


def _expected(world: int, lengths: list[int]) -> list[Tensor]:
    total = torch.empty(sum(lengths))
    tree_sum([_values(rank, sum(lengths)) for rank in range(world)], total)
    return list(total.split(lengths))


@pytest.mark.parametrize(
    ("world", "lengths"),
    [
        (1, [700]),
        (2, [512, 512]),
        (2, [512, 256]),
        (4, [512, 512, 256, 0]),
        (8, [256, 256, 256, 0, 0, 0, 0, 0]),
        (3, [768, 768, 512]),
        (2, [0, 0]),
    ],
)
def test_each_rank_has_the_sum_of_its_part(world: int, lengths: list[int]) -> None:
    expected = _expected(world, lengths)
    for staging in (world * max(lengths), world * 256, world * 300, world * 7):
        for apart in (False, True):
            found = _reduced(world, lengths, staging or world, apart=apart)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (staging, apart)


def test_staging_is_bounded() -> None:
    assert staging_elements(1000, 4) == 4000
    assert staging_elements(10**9, 8) == CHUNK
