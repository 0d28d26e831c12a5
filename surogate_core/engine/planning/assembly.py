"""The parts of a run: one frozen object that the engine, the plan, the prediction and the export read."""

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
from surogate_core.dsl.sides import RouterLosses
from surogate_core.dsl.trace import Compiler, Recompute
from surogate_core.engine.stores import NO_OFFLOAD, DeviceStores
from surogate_core.kernels.registry import KernelTable
from surogate_core.mesh.axes import Axes

ROWS_OF_VOCABULARY = 2
"""Rows of the embedding's gradient are exchanged if this many times their number is at most the vocabulary: in 16 bits
they then have a quarter of the bytes of the table's sums, or less."""


LAUNCHED_TOKENS = 8192
"""Tokens of a micro-batch from which a GPU takes longer than the host that launches its kernels: chosen, and true of
16384."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of an engine, in addition to the model and its plugins."""

    device: torch.device
    tokens: int
    """N, tokens of every micro-batch; if ranks share it, each rank's part of them."""
    borders: int
    """S, document borders of every micro-batch."""
    max_seqlen: int
    """Tokens of the longest document that a micro-batch may have."""
    dtype: torch.dtype = torch.float32
    """Dtype of weights and activations."""
    adapter_dtype: torch.dtype = torch.float32
    """Dtype in which adapters are multiplied."""
    compiler: Compiler = "fx"
    cuda_graphs: bool = False
    """Whether a GPU replays the micro-step and the optimizer step as CUDA graphs."""
    head_chunks: int = 1
    """Number of chunks of the tokens; the logits of one chunk exist at a time."""
    recompute: Recompute = field(default_factory=lambda: Recompute(block=False))
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    seed: int = 0
    """Seed of dropout; a mask depends on it, the step, the micro-step, the layer and the slot."""
    columns: tuple[str, ...] = ()
    """Names of the columns of every micro-batch."""
    plain_first: int = 0
    """Number of first layers that multiply plainly instead of by the recipe."""
    plain_last: int = 0
    """Number of last layers that multiply plainly instead of by the recipe."""
    master_dtype: torch.dtype = torch.float32
    """float32, or bfloat16 written with stochastic rounding."""
    update_on_cpu: bool = False
    """Whether the CPU runs the optimizer step, on masters and gradients in its memory."""
    axes: Axes = field(default_factory=Axes)
    """What the ranks of the run divide, and how."""
    router_losses: RouterLosses = field(default_factory=RouterLosses)
    """The losses of routers that are part of the loss."""


def _keeps_none(name: str) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """The parts of a run, put together in one place (`run.assemble`). A new capability is a field here."""

    model: Model
    settings: EngineSettings
    kernels: KernelTable
    recipe: Recipe
    objective: Objective
    optimizer: OptimizerSpec
    optimizer_options: Any = None
    offloader: OffloaderSpec = NO_OFFLOAD
    stores: Stores = field(default_factory=DeviceStores)
    """The stores that the offloader built; a prediction, which allocates nothing, does not read them."""
    lora: LoRA | None = None
    """The trained adapters; None trains every weight."""
    weight_format: WeightFormat | None = None
    """The storage format of frozen projections; None keeps them unchanged, or as the recipe packs them."""
    keeps_as_it_is: Callable[[str], bool] = _keeps_none
    """HF name → whether the weight format skips this weight."""
    packs: bool = True
    """Whether the recipe packs frozen weights; otherwise it multiplies with them as with trained ones."""
    joins_frozen: bool = True
    """Whether frozen projections of one input may be one product, which may round otherwise."""

    offload_experts: bool = False
    """Whether the offloader's store of weights has the frozen experts, if it has not all frozen weights."""

    @property
    def captured(self) -> bool:
        """Whether a GPU replays the steps as CUDA graphs.

        Not where experts compute one half of the tokens while the other is under way (`dsl.mixture`), unless there are
        so few that the host would be slower than the GPU: in a graph of 48 layers no kernel ran beside an exchange,
        though in one of 6 layers they did (four H200s, CUDA 13.0).
        """
        settings = self.settings
        possible = settings.device.type == "cuda" and settings.cuda_graphs and self.offloader.addressable
        return possible and not (self.exchanges_halves and settings.tokens >= LAUNCHED_TOKENS)

    @property
    def exchanges_halves(self) -> bool:
        """Whether half of the tokens of shared experts are under way while the experts compute the other half in
        training: not for a recipe whose scales are of all rows that are multiplied together.
        """
        axes, recipe = self.settings.axes, self.recipe
        of_rows = recipe.grouped is None or recipe.expert_codes is not None
        return axes.expert > 1 and not axes.expert_rows and self.lora is not None and of_rows

    @property
    def adds_replicas_once(self) -> bool:
        """Whether the gradient sums of a rank's parts go to the other replicas once in a step, not in every micro-step.

        Exact sums are over the ranks first, and no fabric sends sums that are in host memory.
        """
        axes = self.settings.axes
        return axes.replicate > 1 and axes.shards_gradients and not axes.exact and not self.offloader.moves("gradients")

    @property
    def sends_rows(self) -> bool:
        """Whether the ranks that share out a tensor exchange the rows of the embedding's gradient (`EmbeddingRows`),
        instead of its sums. Where ranks exchange values inside of layers, everything else is in the compute stream.
        """
        settings, axes = self.settings, self.settings.axes
        apart = self.lora is None and not self.model.tied and not axes.exchanges
        here = not settings.update_on_cpu and not self.offloader.moves("gradients")
        # Replicas add their sums afterwards.
        few = ROWS_OF_VOCABULARY * axes.shard * settings.tokens <= self.model.vocab_size
        return axes.reduces_later and apart and here and few

    @property
    def experts_apart(self) -> bool:
        """Whether frozen experts are elsewhere than the other weights."""
        return self.offload_experts and self.offloader.place != "device" and not self.offloader.moves("weights")

    @property
    def streams_frozen(self) -> bool:
        """Whether frozen weights come to the device piece by piece, from the offloader's place or from other ranks."""
        shared = self.settings.axes.shards_weights and self.lora is not None
        return shared or self.offloader.moves("weights")
