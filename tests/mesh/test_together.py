"""What ranks gather while they make a step together."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_core.bundles import Stopped, Together
from surogate_testing.virtual import in_threads


def test_every_rank_has_the_bytes_of_all() -> None:
    def rank(fabric: Any) -> Any:
        together = fabric.mesh().together()
        sizes = (b"", bytes([together.rank]) * (1000 * together.rank), b"\0\1")
        return [together.gather(lambda size=size: size) for size in sizes], [n for n in range(5) if together.own(n)]

    found = in_threads(3, rank)
    gathered = [[b""] * 3, [b"", b"\1" * 1000, b"\2" * 2000], [b"\0\1"] * 3]
    assert found == [(gathered, [0, 3]), (gathered, [1, 4]), (gathered, [2])]


def test_one_rank_gathers_its_own() -> None:
    assert Together().gather(lambda: b"x") == [b"x"]
    assert Together().own(7)


def test_a_signal_to_one_rank_stops_all() -> None:
    def rank(fabric: Any) -> None:
        together = fabric.mesh().together()

        def make() -> bytes:
            if together.rank == 1:
                raise Stopped
            return b"x"

        with pytest.raises(Stopped):
            together.gather(make)
        assert together.gather(lambda: b"y") == [b"y"] * 2

    in_threads(2, rank)
