"""A toy family whose blocks have a router: it reports tokens per expert and adds a term to the loss.

Its plugin is this module: a test installs one that imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surogate_core import bundles, hookimpl
from surogate_core.dsl import Block, Dim, Linear, Setting, Side, Stack
from surogate_core.kernels import ops
from surogate_testing import tiny

SUROGATE_API = ">=2,<3"
EXPERTS = Dim("num_experts")
CONFIG: Mapping[str, Any] = {
    **tiny.CONFIG,
    "model_type": "toy_router",
    "num_experts": 4,
    "router_aux_loss_coef": 0.5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
}


class RoutedBlock(tiny.TinyBlock):
    """A block that gates its output by a router with one winner a token."""

    router = Linear("router", tiny.D, EXPERTS, region="ffn")
    tokens = Side("router.tokens", EXPERTS, role="expert_tokens")
    balance = Side("router.balance", role="loss", coefficient=Setting("router_aux_loss_coef", default=0.001))
    entropy = Side("router.entropy")

    def forward(  # type: ignore[override]
        self, x: Tensor, tables: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """[N, D] → [N, D] and the side outputs."""
        h_ND = ops.rms_norm(x, self.norm, self.eps)
        share_NE = torch.softmax(self.router(h_ND).float(), dim=-1)
        chosen_NE = torch.nn.functional.one_hot(share_NE.argmax(-1), share_NE.shape[1]).float()
        balance = share_NE.shape[1] * (chosen_NE.mean(0) * share_NE.mean(0)).sum()
        entropy = -(share_NE * share_NE.log()).sum(-1).mean()
        gate_N1 = (share_NE * chosen_NE).sum(-1, keepdim=True).to(x.dtype)
        y_ND = super().forward(x, tables) * (0.5 + gate_N1)
        return y_ND, {"router.tokens": chosen_NE.sum(0), "router.balance": balance, "router.entropy": entropy}


class RoutedModel(tiny.TinyModel):
    """Two routed blocks."""

    architecture = "ToyRouter"
    layers = Stack(RoutedBlock, Dim("num_hidden_layers"), "layers.{i}.")


class Misnamed(tiny.TinyBlock):
    """Returns a side output under a name that it does not declare."""

    tokens = Side("router.tokens", EXPERTS)

    def forward(  # type: ignore[override]
        self, x: Tensor, tables: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """[N, D] → [N, D] and a wrong name."""
        return super().forward(x, tables), {"tokens": x.new_zeros(4)}


class MisnamedModel(tiny.TinyModel):
    """Two of them."""

    layers = Stack(Misnamed, Dim("num_hidden_layers"), "layers.{i}.")


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """The family."""
    return bundles.ModelFamily(
        name="toy-router", hf_model_types=("toy_router",), build=RoutedModel, presets={"tiny": CONFIG}
    )


__all__ = ["SUROGATE_API", "Block", "surogate_model_family"]
