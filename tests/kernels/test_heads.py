"""Ranks that share rows: the numbers by which traced programs know them, and attention over their heads."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.kernels import heads, linked, ops
from surogate_testing.op_cases import random
from surogate_testing.virtual import in_threads


class Slow(dict[int, Any]):
    """A dictionary that lets other threads run while a number is looked up."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        time.sleep(0.002)
        return found


def test_ranks_in_threads_take_different_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    fabrics = Slow()
    monkeypatch.setattr(linked, "_fabrics", fabrics)

    def rank(fabric: Any) -> tuple[int, bool]:
        rows = heads.SharedRows(fabric.world)
        rows.open(fabric)
        return rows.number, fabrics[rows.number] is fabric

    assert sorted(in_threads(4, rank)) == [(number, True) for number in range(4)]


def test_extensions_over_shared_rows_are_those_of_one_rank() -> None:
    """Values, and gradients added over the ranks; each rank has the sinks of all heads."""
    tensors = [random(12, 4, 8, seed=0), random(12, 1, 8, seed=1), random(12, 1, 6, seed=2), random(4, seed=3)]
    borders, dy = torch.tensor([0, 5, 12], dtype=torch.int32), random(12, 4, 6, seed=4)

    def attended(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, dy: Tensor) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
        y = ops.attention(*leaves[:3], borders, 7, 0.3, window=3, softcap=2.0, sinks=leaves[3])
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    def rank(fabric: Any) -> list[Tensor]:
        rows = heads.SharedRows(fabric.world)
        rows.open(fabric)
        with linked.among(rows):
            mine = [t.chunk(fabric.world)[fabric.rank] for t in (*tensors[:3], dy)]
            return attended(*mine[:3], tensors[3], mine[3])

    alone = attended(*tensors, dy)
    for world in (2, 4):
        ranks = in_threads(world, rank)
        for number, wanted in enumerate(alone[:4]):
            torch.testing.assert_close(torch.cat([r[number] for r in ranks]), wanted)
        torch.testing.assert_close(torch.stack([r[4] for r in ranks]).sum(0), alone[4])
        assert all(int(r[4].count_nonzero()) == 4 // world for r in ranks)
