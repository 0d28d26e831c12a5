"""Side outputs: small named tensors that a block returns beside its output.

They are further outputs of a traced forward. Its backward takes a gradient for each that is part of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from surogate_core.dsl.dims import Dim, Setting, size_of

Role = Literal[
    "figure",
    "loss",
    "expert_tokens",
    "router_probability",
    "router_z",
    "router_mass",
    "router_aux_loss",
    "router_z_loss",
]
"""figure: for events only. loss: a 0-d term of the loss.

expert_tokens [E], router_probability [E], router_z and router_mass, 0-d, are sums over the tokens of a layer with
experts: tokens of each expert, their probabilities, squares of the logits' log-sum-exp, and probabilities of the chosen
experts. The engine makes router_aux_loss and router_z_loss of them: terms of the loss, with their coefficients.
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


Form = Literal["step", "micro_batch", "layer"]
"""What the load-balancing loss is a product of means over; see `router_aux_loss_form`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLosses:
    """The losses of a model's routers; a coefficient of 0 leaves one out."""

    aux: float = 0.0
    """Coefficient of the load-balancing loss."""
    z: float = 0.0
    """Coefficient of the z loss, the mean of the squared log-sum-exp of the router's logits."""
    form: Form = "step"

    def covers(self, role: Role) -> bool:
        """Whether a side output of this role is a term of the loss."""
        return role == "loss" or bool(self.aux if role == "router_probability" else role == "router_z" and self.z)


@dataclass(frozen=True, slots=True)
class SideSpec:
    """A side output with its shape."""

    name: str
    shape: tuple[int, ...]
    role: Role
    coefficient: float


def reported(sides: Mapping[str, Tensor], specs: Sequence[SideSpec], losses: RouterLosses) -> list[Tensor]:
    """The side outputs as further outputs of a program, in fp32. Only terms of the loss are differentiated.

    They are copied, because AOTAutograd exports no output that is a view.
    """
    values = [sides[spec.name] if losses.covers(spec.role) else sides[spec.name].detach() for spec in specs]
    return [value.float().clone() for value in values]
