"""Side outputs: small named tensors that a block returns beside its output.

They are further outputs of a traced forward. Its backward takes a gradient for each that is part of the loss. A layer
with experts reports what its router chose: `router_sides`, `router_figures`.

Shape suffixes: N tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.dsl.dims import Dim, Setting, size_of
from surogate_core.dsl.experts import Routes
from surogate_core.kernels.experts import TOTAL
from surogate_core.kernels.ops import wide

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


TOKENS, PROBABILITY, Z, MASS = "router.tokens", "router.probability", "router.z", "router.mass"


def router_sides(experts: Dim) -> tuple[Side, Side, Side, Side]:
    """The side outputs that `router_figures` returns, for the attributes of a block."""
    return (
        Side(TOKENS, experts, role="expert_tokens"),
        Side(PROBABILITY, experts, role="router_probability"),
        Side(Z, role="router_z"),
        Side(MASS, role="router_mass"),
    )


def router_figures(
    logits_NE: Tensor, routes: Routes, tables: Mapping[str, Tensor], *, sigmoid: bool = False
) -> dict[str, Tensor]:
    """The side outputs of a layer; padding does not count. `sigmoid`: probabilities are the sigmoids over their sum."""
    real_N = tables[REAL] if REAL in tables else torch.ones_like(logits_NE[:, 0], dtype=torch.bool)
    probability_E, z, mass = _Sums.apply(logits_NE, real_N, routes.experts_NK, sigmoid)
    tokens_E = _tokens(routes.experts_NK, logits_NE.shape[1], real_N)
    return {TOKENS: tokens_E, PROBABILITY: probability_E, Z: z, MASS: mass}


def _tokens(experts_NK: Tensor, count: int, real_N: Tensor) -> Tensor:
    """[E] fp32: the tokens of each expert, by one reduction, so that nothing is added by atomics."""
    numbers_E = torch.arange(count, device=experts_NK.device, dtype=experts_NK.dtype)
    chosen_NKE = (experts_NK[:, :, None] == numbers_E) & real_N[:, None, None]
    return chosen_NKE.sum((0, 1)).float()


def _shares(logits_NE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sigmoids [N, E], their sums [N, 1], their quotients)."""
    scores_NE = torch.sigmoid(logits_NE)
    total_N1 = scores_NE.sum(-1, keepdim=True) + TOTAL
    return scores_NE, total_N1, scores_NE / total_N1


class _Sums(Function):
    """(router_probability [E], router_z, router_mass) of logits [N, E], over the positions that are tokens.

    The last has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NE: Tensor, real_N: Tensor, experts_NK: Tensor, sigmoid: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(logits_NE, real_N)
        ctx.sigmoid = sigmoid
        wide_NE = wide(logits_NE)
        z_N = torch.logsumexp(wide_NE, dim=-1)
        probabilities_NE = _shares(wide_NE)[2] if sigmoid else torch.softmax(wide_NE, dim=-1)
        probabilities_NE = torch.where(real_N[:, None], probabilities_NE, 0.0)
        mass = probabilities_NE.gather(1, experts_NK.long()).sum()
        ctx.mark_non_differentiable(mass)
        return probabilities_NE.sum(0), torch.where(real_N, z_N.square(), 0.0).sum(), mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobability_E: Tensor, dz: Tensor, dmass: Any) -> tuple[Tensor | None, ...]:
        logits_NE, real_N = ctx.saved_tensors
        wide_NE = wide(logits_NE)
        probabilities_NE = torch.softmax(wide_NE, dim=-1)
        of_z_N1 = 2 * dz * torch.logsumexp(wide_NE, dim=-1, keepdim=True)
        if ctx.sigmoid:
            scores_NE, total_N1, shares_NE = _shares(wide_NE)
            dscores_NE = (dprobability_E - (shares_NE * dprobability_E).sum(-1, keepdim=True)) / total_N1
            dlogits_NE = dscores_NE * scores_NE * (1 - scores_NE) + probabilities_NE * of_z_N1
        else:
            inner_N1 = (probabilities_NE * dprobability_E).sum(-1, keepdim=True)
            dlogits_NE = probabilities_NE * (dprobability_E - inner_N1 + of_z_N1)
        return torch.where(real_N[:, None], dlogits_NE, 0.0).to(logits_NE.dtype), None, None, None
