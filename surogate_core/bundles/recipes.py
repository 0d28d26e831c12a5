"""Precision recipes: how linear slots multiply.

Suffixes: N tokens, I inputs, O outputs, R and K rows and columns of any matrix, P slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from surogate_core.bundles.options import NoOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from surogate_core.dsl.slots import LinearSlot, TracedSlot
    from surogate_core.kernels.panels import PanelShape

Role = Literal["activation", "weight", "gradient"]
"""What an operand of a slot's products is."""


class RecipeState(Protocol):
    """What a recipe carries from one optimizer step to the next, for all slots of the model at once."""

    @property
    def rows(self) -> Tensor:
        """[P, K] fp32, one row a slot: what `linear` reads as `slot.row`. Updated in place."""

    def update(self, observed: Tensor, skip: Tensor) -> None:
        """Take in what the slots saw since the last update, with no host synchronisation.

        `observed`: [P, K] fp32, the largest of each figure over the micro-steps, NaN where one was.
        `skip`: 0-d fp32, 1 when the gradients are not finite: nothing may change then.
        """

    def state(self) -> dict[str, Tensor]:
        """The live state tensors by name; loading copies into them in place."""


@runtime_checkable
class RangedState(RecipeState, Protocol):
    """A recipe state whose rows are scales: it can say how much of the formats' range the slots used."""

    @property
    def formats(self) -> Mapping[str, float]:
        """Role of each column of `rows`, in order → the smallest normal number of its format over the largest."""

    def used_range(self, observed: Tensor) -> Tensor:
        """[P, K] fp32: the largest value seen, scaled as it was, over the largest of the format.

        Called before `update` with what that gets. Above 1 values were cut off; 0 where nothing was seen or the
        scale was the tensor's own. No host synchronisation.
        """


class PanelOp(Protocol):
    """A product of several adapted slots together: they read one input and their weights are frozen.

    Layers share their programs only if their panel ops are equal and have equal hashes.
    """

    @property
    def op(self) -> str:
        """The registered op that multiplies; the panel op is used only where a kernel pack offers a kernel for it."""

    def fits(self, shape: PanelShape, tokens: int) -> bool:
        """Whether the op takes a panel of this shape with that many tokens."""

    def pack(self, weight_OI: Tensor) -> Tensor:
        """The one tensor that the op reads in place of a frozen weight; called as `Recipe.pack` is."""

    def multiply(
        self,
        x_NI: Tensor,
        panel: Tensor,
        seed: Tensor | None,
        shape: PanelShape,
        weights: Sequence[Tensor],
        rows: Sequence[Tensor],
        adapters: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """[N, O] of each slot without bias, its adapter included; traced with its backward.

        `panel`: A's and B's as `PanelShape` lays them out, with `shape.frozen` false. `weights`: one tensor a slot, as
        `pack` makes it. `rows`: one row a slot of the recipe's state. `adapters`: A and B of each slot in turn, which
        the gradients are of.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeContext:
    """What a recipe is built for."""

    device: torch.device
    """The compute device."""
    dtype: Literal["fp32", "bf16"]
    """The model's dtype, which activations and weights have when `linear` gets them."""


class Recipe:
    """A precision recipe, ready for one device: what `RecipeSpec.build` returns.

    A recipe overrides `linear`, and what else it has.
    """

    name: str
    """The spec's name."""
    plain: bool = False
    """Whether `linear` is x Wᵀ in the dtype of both; then an adapter may be folded into the product."""
    note: str | None = None
    """What the run says of the recipe once."""
    panel_op: PanelOp | None = None
    """What multiplies adapted slots with frozen weights instead of `linear`, where a kernel pack offers its op."""
    pack: Callable[[Tensor, LinearSlot], Tensor] | None = None
    """(frozen weight_OI, slot) → the one tensor, of any shape and dtype, that `linear` gets in its place; called once a
    weight. Traced for its shape, so plain torch ops only. A method, or None: frozen weights stay as they are."""
    rounded: Callable[[Tensor, Role], tuple[Tensor, Tensor]] | None = None
    """(matrix [R, K], K the inner dimension of its product; role) → (the values that it rounds to, fp32 [R, K]; where
    they are cut off, bool [R, K]). For reports. A method, or None."""

    def linear(self, x_NI: Tensor, weight_OI: Tensor, slot: TracedSlot) -> Tensor:
        """y_NO in x's dtype, traced with its backward; no bias, no adapter."""
        raise NotImplementedError

    def state(self, slots: int, device: torch.device) -> RecipeState | None:
        """The state of that many slots on a device, which may be ``meta``; None if the recipe has none."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSpec:
    """A precision recipe."""

    name: str
    """The value of `recipe`."""
    build: Callable[[Any, RecipeContext], Recipe]
    """(options, what it is built for) → the recipe; raises `MachineError` if the device cannot run it."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
    mistakes: Callable[[Any, Callable[[], Literal["fp32", "bf16"]]], Iterable[tuple[str, str, str]]] = (
        lambda options, dtype: ()
    )
    """(options, the model's dtype when called) → (option, what is wrong with it, the fix) of each mistake; for the
    configuration's check, before anything is built."""
    packs: bool = False
    """Whether what is built has `pack`; asked before anything is built."""
    unavailable: Callable[[torch.device], str | None] = lambda device: None
    """Why the device cannot run the recipe natively, or None."""
