"""The numbers by which traced programs know the ranks that share rows."""

from __future__ import annotations

import time
from typing import Any

import pytest

from surogate_core.kernels import heads
from surogate_core.mesh.virtual import in_threads


class Slow(dict[int, Any]):
    """A dictionary that lets other threads run while a number is looked up."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        time.sleep(0.002)
        return found


def test_ranks_in_threads_take_different_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    fabrics = Slow()
    monkeypatch.setattr(heads, "_fabrics", fabrics)

    def rank(fabric: Any) -> tuple[int, bool]:
        rows = heads.SharedRows.of(fabric)
        return rows.number, fabrics[rows.number] is fabric

    assert sorted(in_threads(4, rank)) == [(number, True) for number in range(4)]
