"""Initial values of parameters that are trained from random weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

InitName = Literal["normal", "ones", "zeros", "lora_a"]
Init = InitName | Callable[[Tensor], Tensor]
"""A name, or a function: uniform numbers in [0, 1) of the parameter's shape, fp32 → the values, in the same shape.

"normal" has the standard deviation `initializer_range`; "lora_a" is uniform in ±1/√inputs, as in PEFT.
"""


def constant(value: float) -> Init:
    """Every element is `value`."""
    return _Range(value, value)


def uniform(low: float, high: float) -> Init:
    """Uniform in [low, high)."""
    return _Range(low, high)


def log_uniform(low: float, high: float) -> Init:
    """exp of uniform numbers in [log low, log high), as for the time steps of Mamba (arXiv 2312.00752, section 3.6)."""
    return _LogRange(low, high)


def log_of_uniform(low: float, high: float) -> Init:
    """log of uniform numbers in [low, high), as for the decays A of Mamba 2 (arXiv 2405.21060)."""
    return _LogOfRange(low, high)


def softplus_inverse(init: Callable[[Tensor], Tensor]) -> Init:
    """The numbers whose softplus, log(1 + exp(x)), has the positive values of `init`, as for biases of time steps."""
    return _SoftplusInverse(init)


# Dataclasses rather than closures: equal declarations are equal, and their repr says what they are.


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float

    def __call__(self, uniform: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * uniform


@dataclass(frozen=True, slots=True)
class _LogRange:
    low: float
    high: float

    def __call__(self, uniform: Tensor) -> Tensor:
        return _Range(math.log(self.low), math.log(self.high))(uniform).exp()


@dataclass(frozen=True, slots=True)
class _LogOfRange:
    low: float
    high: float

    def __call__(self, uniform: Tensor) -> Tensor:
        return _Range(self.low, self.high)(uniform).log()


@dataclass(frozen=True, slots=True)
class _SoftplusInverse:
    init: Callable[[Tensor], Tensor]

    def __call__(self, uniform: Tensor) -> Tensor:
        positive = self.init(uniform)
        return positive + torch.log(-torch.expm1(-positive))
