"""Whether experts pay: a small Qwen3-MoE beside a dense Qwen3 of equal active size, from scratch, on the same tokens.

Both have the same attention, embedding and number of layers. A token goes through 4 of 32 experts, which together are
as wide as the dense feed-forward, so a step has the same number of multiplications but for the router's. Text, rows,
schedule and seeds are those of `optimizer_training.py`. The routers' load-balancing and z losses are on. A sweep
chooses the learning rate of each kind.

    python benchmarks/sparse_training.py --out DIR [--steps 1000 …] [--device cpu --tiny]
"""

from __future__ import annotations

from typing import Any

import loss_parity
import optimizer_training
from optimizer_training import SWEEP_SEED, Comparison, Setting, source
from surogate_model_qwen3.model import build as build_dense
from surogate_model_qwen3_moe.model import build as build_sparse

from surogate_core.dsl.sides import RouterLosses
from surogate_core.engine.engine import Engine

EXPERTS, CHOICES = 32, 4
LOSSES = RouterLosses(aux=0.01, z=0.001)
"""The losses of the routers. The held-out loss is the cross-entropy alone."""


def config_of(kind: str, setting: Setting) -> dict[str, Any]:
    """The config.json of a kind; experts of a token are together as wide as the dense feed-forward."""
    dense = setting.config
    if kind == "dense":
        return dense
    experts = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOICES,
        "moe_intermediate_size": dense["intermediate_size"] // CHOICES,
        "norm_topk_prob": True,
    }
    return {**dense, **experts}


def make(kind: str, setting: Setting) -> Engine:
    """The engine of a kind, with the sweep's initial weights."""
    build = build_dense if kind == "dense" else build_sparse
    model = build(config_of(kind, setting))
    weights, losses = source(SWEEP_SEED, setting), None if kind == "dense" else LOSSES
    return loss_parity.make_engine("bf16", setting, weights, lora=False, model=model, router_losses=losses)


COMPARISON = Comparison(
    name="sparse_training",
    script=__file__,
    rates={"dense": (5e-4, 1e-3, 2e-3), "sparse": (5e-4, 1e-3, 2e-3)},
    make=make,
)

if __name__ == "__main__":
    optimizer_training.main(COMPARISON, __doc__.split("\n")[0])
