"""Curves: thinning, means, axes and figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from surogate_commands.curves import POINTS, Curve, chart, figure, smoothed, thinned


def test_thinning_keeps_spikes_ends_and_gaps() -> None:
    points = [(float(x), 1.0) for x in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    points[77_777] = (77_777.0, -3.0)
    points[12_345] = (12_345.0, math.nan)
    thin = thinned(points)
    assert len(thin) <= POINTS
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert {points[54_321], points[77_777]} <= set(thin)
    assert any(x == 12_345.0 for x, _ in thin)
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)
    assert thinned(points[:POINTS]) == points[:POINTS]


@pytest.mark.parametrize("keep", [0.01, 0.5, 0.9, 0.999])
def test_a_mean_is_without_bias_and_skips_what_is_not_finite(keep: float) -> None:
    values = np.random.default_rng(0).normal(3.0, 1.0, 5000)
    values[[0, 7, 8, 4999]] = math.nan, math.inf, -math.inf, math.nan
    sums = weights = 0.0
    expected = np.full(5000, np.nan)
    for place, value in enumerate(values):
        if math.isfinite(value):
            sums, weights = keep * sums + (1 - keep) * value, keep * weights + (1 - keep)
            expected[place] = sums / weights
    found = smoothed(values, keep, np.arange(5000))
    some = np.array([0, 1, 8, 2500, 4998, 4999])
    np.testing.assert_array_equal(
        smoothed(values, keep, some), np.where(np.isfinite(values[some]), found[some], np.nan)
    )
    expected[~np.isfinite(values)] = np.nan
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert found[1] == pytest.approx(values[1], rel=1e-12)
    assert smoothed(np.empty(0), keep, np.arange(0)).size == 0


def test_figures() -> None:
    values = (0.0, 0.5, 1234.0, 93_512.0, 1.2e6, 3e9, 2e-5, -4.0)
    assert [figure(v) for v in values] == ["0", "0.5", "1234", "93.51k", "1.2M", "3G", "2.0e-05", "-4"]


def test_an_amount_has_an_axis_from_zero() -> None:
    curve = Curve(label="", points=[(1, 1000.0), (2, 1001.0)])
    assert ">0</text>" in chart("Peak memory", [curve], from_zero=True)
    assert ">0</text>" not in chart("Loss", [curve])
