"""Precision recipes: how linear slots multiply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from surogate_core.bundles.options import NoOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from surogate_core.dsl.slots import LinearSlot, TracedSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSettings:
    """The flat precision keys of the configuration that every recipe may read."""

    fp8_amax_history: int = 1024
    no_fp4_stochastic_rounding: bool = False
    fp4_backend: str = "cutlass"
    """cutlass or cudnn."""
    matmul_dtype: str | None = None
    """fp32, bf16, e4m3, or None: the model's."""
    gradient_dtype: str | None = None
    """fp32, bf16, e5m2, or None: the recipe's choice."""
    model_dtype: str | None = None
    """fp32 or bf16, of activations and weights as `linear` gets them; None where that is not known."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A precision recipe: how linear slots multiply."""

    name: str
    """The value of `recipe`."""
    linear: Callable[[Tensor, Tensor, TracedSlot, Any], Tensor]
    """(x_NI, weight_OI, slot, options) → y_NO, traced with its backward; no bias, no adapter."""
    plain: bool = False
    """Whether `linear` is x Wᵀ in the dtype of both; then an adapter may be folded into the product."""
    plain_with: Callable[[Any], bool] = lambda options: True
    """Whether `plain` holds with these prepared options."""
    dtypes: Mapping[Literal["matmul_dtype", "gradient_dtype"], str] | None = field(default_factory=dict)
    """What it forces these keys to, and the run says where they are set to something else; None if it follows them."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
    unavailable: Callable[[torch.device], str | None] = lambda device: None
    """Why the device cannot run the recipe natively, or None."""
    prepare: Callable[[Any, RecipeSettings, torch.device], Any] = lambda options, settings, device: options
    """(options, the run's precision keys, device) → what the callables get as options; `MachineError` if it cannot."""
    note: Callable[[Any], str | None] = lambda options: None
    """(prepared options) → what the run says of them once, or None."""
    state: Callable[[int, torch.device, Any], RecipeState] | None = None
    """(number of slots, device, prepared options) → the recipe's state, or None if it has none."""
    pack: Callable[[Tensor, LinearSlot, Any], Tensor] | None = None
    """(frozen weight_OI, slot, prepared options) → the one tensor, of any shape and dtype, that `linear` is given
    in its place; called once a weight. Traced for its shape, so plain torch ops only."""
    scaled_margin: Callable[[Any], int | None] = lambda options: None
    """(prepared options) → the margin with which adapted slots with frozen weights may be multiplied by the op
    `scaled_linears` instead, whose rows of state are those of this recipe; None if they may not."""
    rounded: Callable[[Tensor, str, Any], tuple[Tensor, Tensor]] | None = None
    """(matrix [R, K], K the inner dimension of its product; role: activation, weight or gradient; prepared options)
    → (the values that it rounds to, fp32 [R, K]; where they are cut off, bool [R, K]). For reports."""
