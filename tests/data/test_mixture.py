"""Splits and weighted mixtures: nothing held out is trained on, and each data set comes as often as it was asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surogate_core.data.mixture import count_copies, keep_copies_together, mix, split_documents


@pytest.mark.parametrize(
    ("count", "ratio", "out"), [(10, 0.1, 1), (10, 0.0, 0), (3, 0.1, 1), (1, 0.5, 0), (2, 0.99, 1)]
)
def test_a_split_keeps_something_on_both_sides(count: int, ratio: float, out: int) -> None:
    kept, held = split_documents(count, ratio, 1)
    assert len(held) == out
    assert sorted([*kept, *held]) == list(range(count))
    assert np.all(np.diff(kept) > 0)


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    weights=st.lists(st.floats(0.01, 4.0), min_size=5, max_size=5),
    ratio=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 5),
)
def test_each_data_set_is_taken_as_often_as_its_weight_says(
    sizes: list[int], weights: list[float], ratio: float, seed: int
) -> None:
    kept, out = split_documents(sum(sizes), ratio, seed)
    passes = mix(kept, sizes, weights[: len(sizes)], seed)
    assert [p.tolist() for p in passes] == [p.tolist() for p in mix(kept, sizes, weights[: len(sizes)], seed)]
    taken = np.zeros(sum(sizes), int)
    for part in passes:
        assert (np.diff(part) > 0).all(), "a pass is ascending and takes no document twice"
        taken[part] += 1
    assert not taken[out].any()
    first = 0
    for size, weight in zip(sizes, weights, strict=False):
        mine = kept[(kept >= first) & (kept < first + size)]
        if len(mine):
            wanted = int(weight) * len(mine) + round((weight % 1) * len(mine))
            assert taken[mine].sum() == max(wanted, 1)
            assert set(taken[mine]) <= {int(weight), int(weight) + 1}
        first += size


def test_another_seed_draws_another_part() -> None:
    documents = np.arange(100)
    parts = [mix(documents, [100], [0.5], seed)[0].tolist() for seed in (1, 2)]
    assert parts[0] != parts[1]
    assert len(parts[0]) == len(parts[1]) == 50


@given(
    contents=st.lists(st.integers(0, 12), min_size=2, max_size=60),
    ratio=st.sampled_from([0.02, 0.1, 0.5]),
    seed=st.integers(0, 5),
)
def test_copies_are_on_one_side_of_a_split(contents: list[int], ratio: float, seed: int) -> None:
    digests = np.array(contents, np.uint64)
    assert count_copies(digests) == len(contents) - len(set(contents))
    plain = split_documents(len(contents), ratio, seed)
    kept, out = keep_copies_together(*plain, digests)
    assert sorted([*kept, *out]) == list(range(len(contents)))
    assert (np.diff(kept) > 0).all()
    assert (np.diff(out) > 0).all()
    assert not set(digests[kept].tolist()) & set(digests[out].tolist())
    assert len(kept) > 0
    assert (len(out) > 0) == (len(set(contents)) > 1)
    if len(set(contents)) == len(contents):
        assert (kept.tolist(), out.tolist()) == (plain[0].tolist(), plain[1].tolist())


def test_a_document_that_fills_the_data_is_not_held_out() -> None:
    digests = np.array([7] * 900 + list(range(100, 200)), np.uint64)
    for seed in range(5):
        kept, out = keep_copies_together(*split_documents(1000, 0.1, seed), digests)
        assert (digests[kept] == 7).sum() == 900
        assert 0 < len(out) < 30
