"""Answers are found where models write them, and compared as what they are."""

from __future__ import annotations

from fractions import Fraction

import pytest

from surogate_reinforcement.answers import answer_of, boxed, last_number, marked, numbers, same_answer, tagged


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so 1,234 and -0.5, 3/4", [Fraction(1234), Fraction(-1, 2), Fraction(3, 4)]),
        ("7-3 = 4", [Fraction(7), Fraction(3), Fraction(4)]),
        ("x = -3", [Fraction(-3)]),
        ("$1,000.50.", [Fraction(2001, 2)]),
        ("1,23", [Fraction(1), Fraction(23)]),
        ("1/0 or .5", [Fraction(1, 2)]),
        ("on 3.", [Fraction(3)]),
        ("9" * 10_000, []),
        ("none", []),
    ],
)
def test_numbers(text: str, found: list[Fraction]) -> None:
    assert numbers(text) == found
    assert last_number(text) == (found[-1] if found else None)


def test_places_of_answers() -> None:
    assert boxed(r"a \boxed{1} then \boxed{\frac{1}{2}} end") == r"\frac{1}{2}"
    assert boxed(r"\boxed{never ends") is None
    assert tagged("<answer>1</answer> no, <answer> 2 </answer>") == "2"
    assert tagged("</answer><answer>") is None
    assert marked("12 #### 1,000\nmore") == "1,000"
    assert marked("none") is None
    assert answer_of(r"<think>\boxed{3}</think> I say \boxed{4} of 9") == "4"
    assert answer_of("<think>it is 3") is None
    assert answer_of("3 + 4 = 7.") == "7"


@pytest.mark.parametrize(
    ("found", "right", "same"),
    [
        ("1,200.0", "1200", True),
        ("2400/2", "1200", True),
        ("$1200", "1200", True),
        ("12 apples", "12", True),
        ("120", "12", False),
        ("Paris.", "paris", True),
        ("London", "Paris", False),
        ("", "12", False),
        (None, "12", False),
        ("b4", "b4", True),
        ("b 4 of 5", "b4", False),
        (r"\dfrac{1}{2}", "0.5", True),
        (r"\frac{1}{3}", "1/2", False),
        (r"1{,}200\text{ dollars}", "1200", True),
        (r"\$18", "18", True),
        (r"\text{(B)}", "(b)", True),
    ],
)
def test_same_answer(found: str | None, right: str, same: bool) -> None:
    assert same_answer(found, right) is same
