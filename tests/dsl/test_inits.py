"""Initial values that a declaration names or computes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from surogate_core.dsl.inits import constant, log_of_uniform, log_uniform, softplus_inverse, uniform

UNIFORM = torch.linspace(0, 1, 1001)[:-1]


@pytest.mark.parametrize(
    ("init", "undo", "low", "high"),
    [
        (constant(0.5), lambda v: v, 0.5, 0.5),
        (uniform(-2, 3), lambda v: v, -2, 3),
        (log_uniform(0.001, 0.1), torch.log, math.log(0.001), math.log(0.1)),
        (log_of_uniform(1, 16), torch.exp, 1, 16),
        (softplus_inverse(uniform(0.25, 2)), torch.nn.functional.softplus, 0.25, 2),
    ],
)
def test_values_have_the_range_that_is_named(
    init: Callable[[Tensor], Tensor], undo: Callable[[Tensor], Tensor], low: float, high: float
) -> None:
    torch.testing.assert_close(undo(init(UNIFORM)), low + (high - low) * UNIFORM, rtol=1e-5, atol=1e-5)


def test_equal_declarations_are_equal() -> None:
    assert softplus_inverse(log_uniform(0.001, 0.1)) == softplus_inverse(log_uniform(0.001, 0.1))
    assert uniform(0, 1) != uniform(0, 2)
