"""Side outputs: small named tensors that a block returns beside its output.

They leave a traced program as the gradients of inputs that stand for them (carriers), so a program has one output and
one tangent whatever its block reports. What is a term of the loss gets its gradient on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surogate_core.dsl.dims import Dim, Setting, size_of

Role = Literal["figure", "loss", "expert_tokens", "router_probability", "router_z"]
"""figure: for events only. loss: a 0-d term of the loss. The others are sums over the tokens of a layer with experts:
expert_tokens [E] counts the tokens of each expert, router_probability [E] adds their probabilities, and router_z, 0-d,
the squares of the logits' log-sum-exp.
"""
REAL = "real"
"""The table, [N] bool, that says which positions are tokens, not padding. Blocks with side outputs get it."""


class Side:
    """Declares a side output of a block: a tensor of these dims, which `forward` returns under `name`.

    `forward` then returns (x, {name: tensor, …}) with every declared name. A term of the loss is 0-d, and is given
    before its `coefficient`: with that it is added to the loss of the block's layer, averaged over the micro-steps.
    """

    def __init__(self, name: str, *dims: Dim | int, role: Role = "figure", coefficient: float | Setting = 1.0):
        if role == "loss" and dims:
            raise ValueError(f"side output {name!r}: a term of the loss is 0-d")
        self.name, self.dims, self.role, self.coefficient = name, dims, role, coefficient

    def spec(self, config: Mapping[str, Any]) -> SideSpec:
        """The side output of a model's configuration."""
        coefficient = self.coefficient.value(config) if isinstance(self.coefficient, Setting) else self.coefficient
        return SideSpec(self.name, tuple(size_of(d, config) for d in self.dims), self.role, float(coefficient))


@dataclass(frozen=True, slots=True)
class SideSpec:
    """A side output with its shape."""

    name: str
    shape: tuple[int, ...]
    role: Role
    coefficient: float


class _Attach(torch.autograd.Function):
    """y as it is; the gradient of each carrier is its value, and a term of the loss gets its gradient as a part of it.

    y is copied, because AOTAutograd exports no output that is a view; Inductor fuses the copy with what makes y.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: Tensor, coefficients: Sequence[float | None], *tensors: Tensor) -> Tensor:
        """`coefficients`: one a value, None if it is no term of the loss. `tensors`: the carriers, then the values."""
        ctx.save_for_backward(scale, *tensors[len(coefficients) :])
        ctx.coefficients = coefficients
        return y.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """(dy, values for the carriers, gradients of the terms)."""
        scale, *values = ctx.saved_tensors
        terms = [None if c is None else scale * c for c in ctx.coefficients]
        return dy, None, None, *values, *terms


def attached(
    y: Tensor, sides: Mapping[str, Tensor], specs: Sequence[SideSpec], carriers: Sequence[Tensor], scale: Tensor
) -> Tensor:
    """y with the side outputs attached to its gradient.

    `carriers`: one fp32 tensor a spec, of its shape; their gradients are the side outputs. `scale`: 0-d fp32, what a
    micro-step's terms of the loss are multiplied by.
    """
    values = [sides[spec.name].float() for spec in specs]
    coefficients = [spec.coefficient if spec.role == "loss" else None for spec in specs]
    found: Tensor = _Attach.apply(y, scale, coefficients, *carriers, *values)
    return found
