"""Linear slots: where a weight format, an adapter and a recipe meet.

Shape suffixes: N tokens, I input features, O output features, R adapter rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surogate_core.kernels import ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter (arXiv 2106.09685): y += scale · dropout(x) Aᵀ Bᵀ."""

    rank: int
    scale: float
    """alpha / rank."""
    dropout: float
    dtype: torch.dtype
    """Dtype of the adapter weights that the block receives; the product runs in x's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSlot:
    """One linear projection of a block, as the engine has planned it."""

    name: str
    """Attribute name in the block."""
    module: str
    """HF module path relative to the block, e.g. ``self_attn.q_proj``."""
    inputs: int
    outputs: int
    bias: bool
    group: str
    """Recompute switch that covers its output: ``qkv``, ``att`` or ``ffn``."""
    adapter: Adapter | None
    index: int
    """Position among the block's slots; separates the slots' dropout masks."""


Gemm = Callable[[Tensor, Tensor, LinearSlot, Any], Tensor]


@dataclass(slots=True)
class BoundSlot:
    """A slot with its tensors and its recipe, callable inside a block's forward."""

    slot: LinearSlot
    tensors: Mapping[str, Tensor]
    gemm: Gemm
    gemm_options: Any
    seed: Tensor | None
    """0-d int32 dropout seed of this block in this micro-step; None outside training."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        with ops.region(self.slot.group):
            return self._adapted(x_NI)

    def _adapted(self, x_NI: Tensor) -> Tensor:
        slot, tensors = self.slot, self.tensors
        y_NO = self.gemm(x_NI, tensors["weight"], slot, self.gemm_options)
        if slot.bias:
            y_NO = y_NO + tensors["bias"].to(y_NO.dtype)
        adapter = slot.adapter
        if adapter is None:
            return y_NO
        if adapter.dropout > 0 and self.seed is not None:
            x_NI = ops.dropout(x_NI, self.seed, salt=slot.index, p=adapter.dropout)
        u_NR = x_NI @ tensors["lora_A"].to(x_NI.dtype).t()
        return torch.addmm(y_NO, u_NR, tensors["lora_B"].to(u_NR.dtype).t(), alpha=adapter.scale)
