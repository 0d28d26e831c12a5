"""What a block has beside its rows: side outputs, and values that one layer gives to later ones.

Side outputs are small named tensors that a block returns beside its output, further outputs of a traced forward. Its
backward takes a gradient for each that is part of the loss. A layer with experts reports what its router chose:
`router_sides`, `router_figures`.

A relayed value has rows like the hidden state. The layer that gives it has it as a further output, and each layer that
takes it as a further input; the gradients of all that take it are added for the layer that gives it.

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
from surogate_core.kernels.experts import LEAST_TOTAL
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
    "rank_loads",
]
"""figure: for events only. loss: a 0-d term of the loss.

expert_tokens [E], router_probability [E], router_z and router_mass, 0-d, are sums over the tokens of a layer with
experts: tokens of each expert, their probabilities, squares of the logits' log-sum-exp, and probabilities of the chosen
experts. The engine makes router_aux_loss and router_z_loss of them: terms of the loss, with their coefficients.

rank_loads: `kernels.balancing.moved.Moved.figures`, of layers whose experts ranks share out and whose loads they even
out. The engine adds it to what a block declares.
"""
REAL = "real"
"""The table, [N] bool, that says which positions are tokens, not padding. Blocks with side outputs get it."""
IDS = "input_ids"
"""The table, [N] int64, of the rows' tokens. A block gets it if its class says `reads_ids`."""


@dataclass(frozen=True, slots=True)
class RelayedSpec:
    """A relayed value, as the layer calls it that gives or takes it."""

    name: str
    shape: tuple[int, ...]
    """The shape of one row."""


class Given:
    """Declares what a layer gives to later layers: a value whose rows have these dims, or `count` of them.

    Read on a block it is a function, which `forward` calls once: with [N, *dims], or with [N, count, *dims], of which a
    later layer takes one. With a count the values are called ``name.0``, ``name.1`` and so on.
    """

    name = ""

    def __init__(self, *dims: Dim | int, count: Dim | int | None = None):
        self.dims, self.count = dims, count

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, bound: Any, owner: type) -> Any:
        if bound is None:
            return self

        def give(value: Tensor) -> None:
            names = [spec.name for spec in self.specs(bound.config)]
            bound.given.update(zip(names, [value] if self.count is None else value.unbind(1), strict=True))

        return give

    def specs(self, config: Mapping[str, Any]) -> tuple[RelayedSpec, ...]:
        """The values under a ``config.json`` mapping."""
        shape = tuple(size_of(dim, config) for dim in self.dims)
        if self.count is None:
            return (RelayedSpec(self.name, shape),)
        return tuple(RelayedSpec(f"{self.name}.{number}", shape) for number in range(size_of(self.count, config)))


class Received:
    """Declares what a layer takes of an earlier one, which `Model.source` names: a value whose rows have these dims.

    Read on a block it is the tensor [N, *dims].
    """

    name = ""

    def __init__(self, *dims: Dim | int):
        self.dims = dims

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, bound: Any, owner: type) -> Any:
        return self if bound is None else bound.taken[self.name]

    def spec(self, config: Mapping[str, Any]) -> RelayedSpec:
        """The value under a ``config.json`` mapping."""
        return RelayedSpec(self.name, tuple(size_of(dim, config) for dim in self.dims))


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


LOADS = "expert.ranks"
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
    total_N1 = scores_NE.sum(-1, keepdim=True) + LEAST_TOTAL
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
