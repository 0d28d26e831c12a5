"""The model shapes of the benchmarks: published ones with random weights, and routing that is as uneven as in life.

Shape suffixes: N tokens, D model features, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any

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


def preference(layer: str, experts: int) -> Tensor:
    """[E] fp32: what `SkewedBlock` adds to the logits of a layer, whose order of experts its name decides."""
    generator = torch.Generator().manual_seed(sum(layer.encode()))
    order = torch.randperm(experts, generator=generator)
    return -STEEPNESS * torch.log(order + 1.0)


class Weights(RandomSource):
    """Random weights, and the routers' preferences."""

    def __call__(self, spec: TensorSpec) -> Tensor:
        """The initial value of a tensor."""
        if spec.hf_name.endswith(BIAS):
            return preference(spec.hf_name.removesuffix(BIAS), math.prod(spec.shape)).to(self.device)
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
