"""Standard errors: of a proportion, and of a ratio as a bootstrap finds it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from surogate_core.measure.stderr import mean_stderr, ratio_stderr


def test_the_standard_error_is_that_of_a_proportion() -> None:
    scores = [1.0] * 30 + [0.0] * 70
    assert mean_stderr(scores) == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert math.isnan(mean_stderr([1.0]))


def test_the_standard_error_is_that_of_a_bootstrap() -> None:
    generator = np.random.default_rng(0)
    weights = generator.integers(1, 30, 400).astype(float)
    sums = weights * generator.normal(2.0, 0.7, 400)
    samples = [generator.integers(0, 400, 400) for _ in range(2000)]
    resampled = [sums[s].sum() / weights[s].sum() for s in samples]
    found = ratio_stderr(list(zip(sums, weights, strict=True)), sums.sum() / weights.sum())
    assert found == pytest.approx(np.std(resampled), rel=0.1)
    assert math.isnan(ratio_stderr([(1.0, 1.0)], 1.0))
    assert ratio_stderr([(2.0, 2.0), (2.0, 1.0)], 4 / 3) == pytest.approx(4 / 9), "by hand"
