"""Linear slots: where a weight format, an adapter and a recipe meet.

Shape suffixes: N tokens, I input features, O output features, R adapter rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.bundles import PanelOp
from surogate_core.kernels import ops
from surogate_core.kernels.panels import PanelShape


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
    """One linear projection of a block, as planned by the engine."""

    name: str
    """Attribute name in the block."""
    module: str
    """HF module path relative to the block, e.g. ``self_attn.q_proj``."""
    inputs: int
    """I, features of its input."""
    outputs: int
    """O, features of its output."""
    bias: bool
    """Whether there is a bias, which is added outside of the recipe."""
    region: str
    """Recompute switch that covers its output: ``qkv``, ``att`` or ``ffn``."""
    adapter: Adapter | None
    """Its LoRA adapter, or None."""
    index: int
    """Position among the block's slots; separates the slots' dropout masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSlot(LinearSlot):
    """A slot with everything that a recipe may read besides the operands."""

    seed: Tensor | None = None
    """0-d int32, different in every micro-step and layer; None outside training."""
    row: Tensor | None = None
    """[K] fp32, the slot's row of the recipe's state; the backward returns the observations as its gradient."""
    packed: bool = False
    """Whether the weight is a frozen weight that the recipe's `pack` converted."""

    @classmethod
    def of(cls, slot: LinearSlot, *, seed: Tensor | None, row: Tensor | None, packed: bool) -> TracedSlot:
        """The slot with these tensors."""
        return cls(**{f.name: getattr(slot, f.name) for f in fields(LinearSlot)}, seed=seed, row=row, packed=packed)


Gemm = Callable[[Tensor, Tensor, TracedSlot], Tensor]
"""(x_NI, weight_OI, slot) → y_NO, like `Recipe.linear`."""


def plain_gemm(x_NI: Tensor, weight_OI: Tensor, slot: LinearSlot) -> Tensor:
    """x Wᵀ in the dtype of both operands, for slots of layers that multiply plainly."""
    return x_NI @ weight_OI.t()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Adapted slots that read the same input and are multiplied together; see `kernels.panels`."""

    slots: tuple[LinearSlot, ...]
    shape: PanelShape
    op: PanelOp | None = None
    """The product of a panel that has only adapters; None for a panel that also has the frozen weights."""

    @classmethod
    def of(cls, slots: Sequence[LinearSlot], *, op: PanelOp | None = None) -> Panel | None:
        """The panel of slots that read the same input, or None if they cannot share one.

        `op`: multiplies with the frozen weights outside of the panel.
        """
        adapter = slots[0].adapter
        if adapter is None or any(s.adapter != adapter for s in slots):
            return None
        shape = PanelShape(
            inputs=slots[0].inputs,
            outputs=tuple(s.outputs for s in slots),
            rank=adapter.rank,
            scale=adapter.scale,
            dropout=adapter.dropout,
            salts=tuple(s.index for s in slots),
            frozen=op is None,
        )
        return cls(slots=tuple(slots), shape=shape, op=op) if shape.fits else None


class _Together(ABC):
    """Slots whose outputs are computed together. What was handed out is not kept: without a graph it would stay until
    the garbage collector comes by.
    """

    __slots__ = ("_input", "_outputs", "_slots")

    def __init__(self, slots: Sequence[LinearSlot]):
        self._slots = slots
        self._input: Tensor | None = None
        self._outputs: dict[str, Tensor] = {}

    def output(self, name: str, x_NI: Tensor) -> Tensor:
        """A slot's output without bias. A call with another input, or a second one, computes it again."""
        if x_NI is not self._input or name not in self._outputs:
            names = (slot.name for slot in self._slots)
            self._input, self._outputs = x_NI, dict(zip(names, self._computed(x_NI), strict=True))
        found = self._outputs.pop(name)
        if not self._outputs:
            self._input = None
        return found

    @abstractmethod
    def _computed(self, x_NI: Tensor) -> Sequence[Tensor]:
        """The output of each slot."""


@dataclass(slots=True)
class BoundPanel(_Together):
    """A panel with its tensor inside a block's forward."""

    panel: Panel
    tensor: Tensor
    adapters: Sequence[Tensor]
    """A and B of each slot in turn."""
    masks: Tensor | None
    """As in `BoundSlot`."""
    weights: Sequence[Tensor] = ()
    """The kept weight of each slot, and its row of the recipe's state, if the panel has only adapters."""
    rows: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        _Together.__init__(self, self.panel.slots)

    def _computed(self, x_NI: Tensor) -> Sequence[Tensor]:
        shape, op = self.panel.shape, self.panel.op
        if op is None:
            return ops.adapted_linears(x_NI, self.tensor, self.masks, shape, *self.adapters)
        return op.multiply(x_NI, self.tensor, self.masks, shape, self.weights, self.rows, self.adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Slots that read the same input and whose weights are contiguous: one product for all of them."""

    slots: tuple[LinearSlot, ...]


class _Joined(Function):
    """The outputs in adjacent columns. The backward has one gradient for them, of which each weight's gradient is a
    part.
    """

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, joined_QI: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_NI, joined_QI)
        ctx.outputs = [weight_OI.shape[0] for weight_OI in weights]
        return tuple((x_NI @ joined_QI.t()).split(ctx.outputs, dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, joined_QI = ctx.saved_tensors
        dy_NQ = torch.cat(dys, dim=1)
        dweights = [part.t() @ x_NI for part in dy_NQ.split(ctx.outputs, dim=1)]
        return dy_NQ @ joined_QI, None, *dweights


@dataclass(slots=True)
class BoundJoin(_Together):
    """A join with its weights inside a block's forward."""

    join: Join
    joined: Tensor
    """[Q, I], the weights of all its slots."""
    weights: Sequence[Tensor]
    """The weight of each slot, which receives the gradient."""

    def __post_init__(self) -> None:
        _Together.__init__(self, self.join.slots)

    def _computed(self, x_NI: Tensor) -> Sequence[Tensor]:
        found: tuple[Tensor, ...] = _Joined.apply(x_NI, self.joined, *self.weights)
        return found


@dataclass(slots=True)
class BoundSlot:
    """A slot with its tensors and its recipe, callable inside a block's forward."""

    slot: LinearSlot
    tensors: Mapping[str, Tensor]
    gemm: Gemm
    seed: Tensor | None
    """0-d int32, different in every micro-step, layer and rank; None outside training."""
    masks: Tensor | None
    """[2] int32: the dropout seed of this block in this micro-step, the same on ranks that share its rows, and the
    number of this rank's first row; None outside training."""
    panel: BoundPanel | BoundJoin | None = None
    row: Tensor | None = None
    """[K] fp32: the slot's row of the recipe's state."""
    packed: bool = False
    """Whether the weight is a frozen weight that the recipe packed."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        with ops.region(self.slot.region):
            return self._adapted(x_NI)

    def _adapted(self, x_NI: Tensor) -> Tensor:
        slot, tensors = self.slot, self.tensors
        if self.panel is not None:
            y_NO = self.panel.output(slot.name, x_NI)
        else:
            traced = TracedSlot.of(slot, seed=self.seed, row=self.row, packed=self.packed)
            y_NO = self.gemm(x_NI, tensors["weight"], traced)
        if slot.bias:
            y_NO = y_NO + tensors["bias"].to(y_NO.dtype)
        adapter = slot.adapter
        if adapter is None or self.panel is not None:
            return y_NO
        if adapter.dropout > 0 and self.masks is not None:
            x_NI = ops.dropout(x_NI, self.masks, salt=slot.index, p=adapter.dropout)
        u_NR = x_NI @ tensors["lora_A"].to(x_NI.dtype).t()
        return torch.addmm(y_NO, u_NR, tensors["lora_B"].to(u_NR.dtype).t(), alpha=adapter.scale)
