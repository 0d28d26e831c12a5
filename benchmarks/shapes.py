"""The model shapes of the benchmarks: published ones with random weights, and routing that is as uneven as in life.

Shape suffixes: N tokens, D model features, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal

import torch
from presets import FAMILIES, PRESETS, SPARSE
from surogate_model_qwen3.model import build as build_dense
from surogate_model_qwen3_moe.model import E, Qwen3Moe, SparseBlock
from torch import Tensor

from surogate_core.dsl import Block, Model, Param
from surogate_core.dsl.declare import TensorSpec
from surogate_core.engine.planning.pieces import RandomSource

STEEPNESS = 0.5
"""Expert number i of a layer's order has this times −log(i + 1) added to its logit. With the router's random weights,
whose logits have a standard deviation of 0.9, the largest of 128 experts then gets about 10 times the mean (8 to 12
were measured on Qwen3-30B-A3B by others), and the median expert less than half of it.
"""
BIAS = "mlp.gate.bias"
HOT, HOT_LOGIT = 4, 1.76
"""The first `HOT` experts of a layer, which are all of one GPU, get 30 % of the rows if this is added to their logits:
with 128 experts, 8 for a token and logits of that deviation, a token then goes to each of them with probability 0.6.
"""
Routes = Literal["zipf", "hot", "even"]
"""Which experts routers prefer: some by `STEEPNESS`, the first four, or none."""


class SkewedBlock(SparseBlock):
    """A layer whose router prefers some experts."""

    bias = Param(BIAS, E, init="zeros")

    def scores(self, h: Tensor) -> Tensor:
        """[N, D] → [N, E]."""
        return super().scores(h) + self.bias


class SkewedMoe(Qwen3Moe):
    """Qwen3-MoE with `SkewedBlock`s."""

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, Block]]:
        """Every layer as (HF name prefix, block), in order."""
        skewed = SkewedBlock(self.config, max_seqlen)
        for prefix, block in super().blocks(max_seqlen):
            yield prefix, skewed if isinstance(block, SparseBlock) else block


def preference(layer: str, experts: int, routes: Routes = "zipf") -> Tensor:
    """[E] fp32: what `SkewedBlock` adds to the logits of a layer, whose order of experts its name decides."""
    if routes != "zipf":
        return torch.where(torch.arange(experts) < HOT, HOT_LOGIT if routes == "hot" else 0.0, 0.0)
    generator = torch.Generator().manual_seed(sum(layer.encode()))
    order = torch.randperm(experts, generator=generator)
    return -STEEPNESS * torch.log(order + 1.0)


class Weights(RandomSource):
    """Random weights, and the routers' preferences."""

    def __init__(self, *, seed: int, std: float, device: torch.device, routes: Routes = "zipf"):
        super().__init__(seed=seed, std=std, device=device)
        self.routes = routes

    def __call__(self, spec: TensorSpec) -> Tensor:
        """The initial value of a tensor."""
        if spec.hf_name.endswith(BIAS):
            found = preference(spec.hf_name.removesuffix(BIAS), math.prod(spec.shape), self.routes)
            return found.to(self.device)
        return super().__call__(spec)


def config_of(preset: str, *, layers: int = 0, **changes: Any) -> dict[str, Any]:
    """The config.json of a shape. `layers`: fewer than it has; 0: all. `changes`: other values of keys."""
    return {**PRESETS[preset], **({"num_hidden_layers": layers} if layers else {}), **changes}


def model_of(preset: str, *, layers: int = 0, **changes: Any) -> Model:
    """A shape's model, as of `config_of`. Experts are routed unevenly."""
    config = config_of(preset, layers=layers, **changes)
    if preset in FAMILIES:
        built: Model = import_module(f"{FAMILIES[preset][0]}.model").build(config)
        return built
    return SkewedMoe(config) if preset in SPARSE else build_dense(config)
