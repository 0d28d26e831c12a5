"""What a run is made of: one frozen object that the engine, the plan, the prediction and the export read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from surogate_core.bundles import (
    Objective,
    OffloaderSpec,
    OptimizerSpec,
    Recipe,
    Stores,
    WeightFormat,
)
from surogate_core.dsl.declare import LoRA, Model
from surogate_core.dsl.trace import Compiler, Recompute
from surogate_core.engine.stores import NO_OFFLOAD, DeviceStores
from surogate_core.kernels.registry import KernelTable


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What shapes an engine besides the model and its plugins."""

    device: torch.device
    tokens: int
    """N of every micro-batch."""
    borders: int
    """S of every micro-batch."""
    max_seqlen: int
    """Tokens of the longest document that a micro-batch may have."""
    dtype: torch.dtype = torch.float32
    """Dtype of weights and activations."""
    adapter_dtype: torch.dtype = torch.float32
    """Dtype that adapters are multiplied in."""
    compiler: Compiler = "fx"
    cuda_graphs: bool = False
    """Whether a GPU replays the micro-step and the optimizer step as CUDA graphs."""
    head_chunks: int = 1
    """Parts of the tokens whose logits exist one after the other."""
    recompute: Recompute = field(default_factory=lambda: Recompute(block=False))
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    """0 does not clip."""
    seed: int = 0
    """Seed of dropout; a mask depends on it, the step, the micro-step, the layer and the slot."""
    weighted: bool = False
    """Whether every micro-batch carries loss weights."""
    plain_first: int = 0
    """Layers from the first that the recipe leaves alone."""
    plain_last: int = 0
    """Layers up to the last that the recipe leaves alone."""
    master_dtype: torch.dtype = torch.float32
    """float32, or bfloat16 written with stochastic rounding."""
    update_on_cpu: bool = False
    """Whether the CPU carries out the optimizer step, on masters and gradients that live in its memory."""


def _keeps_none(name: str) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What a run is made of. It is made in one place (`run.assemble`); a new capability is a field here."""

    model: Model
    settings: EngineSettings
    kernels: KernelTable
    recipe: Recipe
    objective: Objective
    optimizer: OptimizerSpec
    optimizer_options: Any = None
    offloader: OffloaderSpec = NO_OFFLOAD
    stores: Stores = field(default_factory=DeviceStores)
    """What the offloader built; a prediction, which allocates nothing, does not look at it."""
    lora: LoRA | None = None
    """The adapters that are trained; None trains every weight."""
    weight_format: WeightFormat | None = None
    """What frozen projections are kept in; None keeps them as they are, or as the recipe packs them."""
    keeps_as_it_is: Callable[[str], bool] = _keeps_none
    """Whether the weight format leaves the weight of an HF name alone."""
