"""Draws are the same everywhere, and fair."""

from __future__ import annotations

from collections import Counter

from surogate_reinforcement.draws import Draws
from surogate_reinforcement.order import HELD_OUT, held_out_numbers, training_numbers


def test_draws_are_these_numbers_for_ever() -> None:
    draws = Draws(1234, 0)
    assert [draws.below(1000) for _ in range(5)] == [662, 250, 49, 189, 975]
    assert Draws(1234, 1).below(2**63) != Draws(1235, 0).below(2**63)
    assert Draws(1234, 0).shuffled("abcdef") == Draws(1234, 0).shuffled("abcdef")


def test_draws_are_fair() -> None:
    draws = Draws(0, 0)
    counts = Counter(draws.between(3, 5) for _ in range(6000))
    assert set(counts) == {3, 4, 5}
    assert all(1850 < count < 2150 for count in counts.values())
    orders = Counter("".join(draws.shuffled("abc")) for _ in range(6000))
    assert len(orders) == 6
    assert all(850 < count < 1150 for count in orders.values())


def test_each_pass_has_every_task_once_in_an_order_of_its_own() -> None:
    passes = training_numbers(0, 20, size=10, seed=5)
    assert sorted(passes[:10]) == sorted(passes[10:]) == list(range(10))
    assert passes[:10] != passes[10:]
    assert training_numbers(7, 6, size=10, seed=5) == passes[7:13]
    assert training_numbers(0, 10, size=10, seed=6) != passes[:10]
    assert training_numbers(40, 3, size=None) == [40, 41, 42]


def test_what_is_held_out_is_never_trained_on() -> None:
    assert held_out_numbers(3, size=None) == [HELD_OUT, HELD_OUT + 1, HELD_OUT + 2]
    assert held_out_numbers(3, size=10, held_out=2) == [10, 11]
    assert held_out_numbers(3, size=10, held_out=20) == [10, 11, 12]
    assert held_out_numbers(3, size=10) == []
