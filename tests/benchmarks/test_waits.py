"""The gaps of a computation's kernels."""

from __future__ import annotations

from waits import gaps, waits

SPANS = [
    ("product", 0.0, 10.0),
    ("Memcpy PtoP (Device -> Device)", 2.0, 25.0),
    ("add_tree_sum", 25.0, 40.0),
    ("attention", 30.0, 50.0),
    ("norm", 51.0, 60.0),
    ("long", 60.0, 100.0),
    ("short", 61.0, 62.0),
    ("Memcpy PtoP (Device -> Device)", 104.0, 106.0),
    ("product", 110.0, 120.0),
]


def test_a_gap_is_where_no_kernel_of_the_computation_runs() -> None:
    found = [(before[0], after[0]) for before, after in gaps(reversed(SPANS))]
    assert found == [("product", "attention"), ("long", "product")], "1 microsecond is none"
    assert gaps([]) == []


def test_gaps_are_summed_by_their_kernels_with_what_ran_in_them() -> None:
    again = [(name, start + 1000.0, stop + 1000.0) for name, start, stop in SPANS]
    long, short = sorted(waits([*SPANS, *again], 2), key=lambda one: -one["milliseconds"])[1:]
    assert (long["before"], long["after"], long["milliseconds"], long["gaps"]) == ("product", "attention", 0.02, 1.0)
    assert long["beside"] == {"Memcpy PtoP (Device -> Device)": 0.015, "add_tree_sum": 0.005}
    assert (short["before"], short["milliseconds"]) == ("long", 0.01)
    assert short["beside"] == {"Memcpy PtoP (Device -> Device)": 0.002}
