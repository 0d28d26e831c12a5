"""What a router reports of its choices: the side outputs of a layer with experts.

Shape suffixes: N tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.dsl.dims import Dim
from surogate_core.dsl.experts import Routes
from surogate_core.dsl.sides import REAL, Side
from surogate_core.kernels.ops import wide

TOKENS, PROBABILITY, Z, MASS = "router.tokens", "router.probability", "router.z", "router.mass"


def router_sides(experts: Dim) -> tuple[Side, Side, Side, Side]:
    """The side outputs that `router_figures` returns, for the attributes of a block."""
    return (
        Side(TOKENS, experts, role="expert_tokens"),
        Side(PROBABILITY, experts, role="router_probability"),
        Side(Z, role="router_z"),
        Side(MASS, role="router_mass"),
    )


def router_figures(logits_NE: Tensor, routes: Routes, tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The side outputs of a layer; padding does not count."""
    real_N = tables[REAL] if REAL in tables else torch.ones_like(logits_NE[:, 0], dtype=torch.bool)
    probability_E, z, mass = _Sums.apply(logits_NE, real_N, routes.experts_NK)
    tokens_E = _tokens(routes.experts_NK, logits_NE.shape[1], real_N)
    return {TOKENS: tokens_E, PROBABILITY: probability_E, Z: z, MASS: mass}


def _tokens(experts_NK: Tensor, count: int, real_N: Tensor) -> Tensor:
    """[E] fp32: the tokens of each expert, by one reduction, so that nothing is added by atomics."""
    numbers_E = torch.arange(count, device=experts_NK.device, dtype=experts_NK.dtype)
    chosen_NKE = (experts_NK[:, :, None] == numbers_E) & real_N[:, None, None]
    return chosen_NKE.sum((0, 1)).float()


class _Sums(Function):
    """(router_probability [E], router_z, router_mass) of logits [N, E], over the positions that are tokens.

    The last has no gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits_NE: Tensor, real_N: Tensor, experts_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(logits_NE, real_N)
        wide_NE = wide(logits_NE)
        z_N = torch.logsumexp(wide_NE, dim=-1)
        probabilities_NE = torch.where(real_N[:, None], torch.softmax(wide_NE, dim=-1), 0.0)
        mass = probabilities_NE.gather(1, experts_NK.long()).sum()
        ctx.mark_non_differentiable(mass)
        return probabilities_NE.sum(0), torch.where(real_N, z_N.square(), 0.0).sum(), mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobability_E: Tensor, dz: Tensor, dmass: Any) -> tuple[Tensor | None, ...]:
        logits_NE, real_N = ctx.saved_tensors
        wide_NE = wide(logits_NE)
        probabilities_NE = torch.softmax(wide_NE, dim=-1)
        inner_N1 = (probabilities_NE * dprobability_E).sum(-1, keepdim=True)
        factor_NE = dprobability_E - inner_N1 + 2 * dz * torch.logsumexp(wide_NE, dim=-1, keepdim=True)
        dlogits_NE = torch.where(real_N[:, None], probabilities_NE * factor_NE, 0.0)
        return dlogits_NE.to(logits_NE.dtype), None, None
