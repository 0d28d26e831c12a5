"""Precision recipes: how linear slots multiply.

Suffixes: N tokens, I inputs, O outputs, E experts, R and K rows and columns of any matrix, P slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from surogate_core.bundles.options import NoOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from surogate_core.dsl.experts import ExpertSlot, TracedExperts
    from surogate_core.dsl.slots import LinearSlot, TracedSlot
    from surogate_core.kernels.experts import Codes
    from surogate_core.kernels.panels import PanelShape

Role = Literal["activation", "weight", "gradient"]
"""The role of an operand in a slot's products."""


class RecipeState:
    """The state of a recipe from one optimizer step to the next, for all slots of the model at once."""

    rows: Tensor
    """[P, K] fp32, one row per slot, which `linear` reads as `slot.row`. Updated in place."""
    formats: Mapping[str, float] = MappingProxyType({})
    """If the rows are scales: role of each column of `rows`, in order → the smallest normal number of its format over
    the largest. The run then reports the used share of the formats' range.
    """

    def update(self, observed: Tensor, skip: Tensor) -> None:
        """Take in the observations of the slots since the last update, without host synchronisation.

        `observed`: [P, K] fp32, the maximum of each figure over the micro-steps, NaN if one of them was. `skip`: 0-d
        fp32, 1 when the gradients are not finite: nothing may change then.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """The live state tensors by name; loading copies into them in place."""
        raise NotImplementedError

    def used_range(self, observed: Tensor) -> Tensor:
        """[P, K] fp32: the largest scaled value, divided by the largest of the format.

        Called before `update` with the same argument, if there are `formats`. Above 1 values were clipped; 0 if nothing
        was observed or the scale came from the tensor itself. No host synchronisation.
        """
        raise NotImplementedError


class PanelOp(Protocol):
    """One product for several adapted slots that read the same input and have frozen weights.

    Layers share their programs only if their panel ops are equal and have equal hashes.
    """

    @property
    def op(self) -> str:
        """The registered op of the product; the panel op is used only if a kernel pack offers a kernel for it."""

    def fits(self, shape: PanelShape, tokens: int) -> bool:
        """Whether the op supports a panel of this shape with this number of tokens."""

    def pack(self, weight_OI: Tensor) -> Tensor:
        """The tensor that the op reads instead of a frozen weight; called like `Recipe.pack`."""

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

        `panel`: A's and B's as `PanelShape` lays them out, with `shape.frozen` false. `weights`: one tensor per slot,
        made by `pack`. `rows`: one row of the recipe's state per slot. `adapters`: A and B of each slot in turn, which
        receive the gradients. `seed`: as in `ops.dropout_mask_of_rows`; no dropout without it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeContext:
    """The context for which a recipe is built."""

    device: torch.device
    """The compute device."""
    dtype: Literal["fp32", "bf16"]
    """The model's dtype, the dtype of the activations and weights that `linear` receives."""


class Recipe:
    """A precision recipe, ready for one device; `RecipeSpec.build` returns it.

    A recipe overrides `linear`, and the other members as needed.
    """

    name: str
    """The spec's name."""
    plain: bool = False
    """Whether `linear` is x Wᵀ in the dtype of both operands; then an adapter may be fused into the product."""
    note: str | None = None
    """A note about the recipe that the run shows once, or None."""
    note_of_experts: str | None = None
    """How `grouped` multiplies; the run shows it once for a model with experts."""
    panel_op: PanelOp | None = None
    """The product for adapted slots with frozen weights, used instead of `linear` if a kernel pack offers its op."""
    pack: Callable[[Tensor, LinearSlot], Tensor] | None = None
    """(frozen weight_OI, slot) → one tensor, of any shape and dtype, that `linear` receives instead; called once per
    weight. Traced for its shape, so plain torch ops only. A method, or None if frozen weights do not change.
    """
    grouped: Callable[[Tensor, Sequence[Tensor], Tensor, Sequence[TracedExperts]], Sequence[Tensor]] | None = None
    """(x_RI, rows sorted by expert; weights_EOI of each slot that reads them; ends_E int32, where each expert's rows
    end; the slots) → y_RO of each slot in x's dtype, without adapters, traced with its backward. A method, or None for
    the plain product in the dtype of both. Where GPUs share out experts, a recipe with `expert_codes` may get rows
    behind the last end, which nothing reads; for others they are zeros of the last expert.
    """
    pack_experts: Callable[[Tensor, ExpertSlot], Tensor] | None = None
    """(frozen weights_EOI, slot) → one tensor that `grouped` receives instead; otherwise like `pack`."""
    expert_codes: Callable[[Tensor, ExpertSlot], tuple[Codes, Codes]] | None = None
    """(what `pack_experts` made, slot) → the codes of W and of Wᵀ, if `grouped` multiplies codes of rows
    (`formats.fp8_rows`) in both directions. A kernel may then compute the product together with adapters.
    """
    expert_parts: Callable[[ExpertSlot], Sequence[tuple[int, int]]] | None = None
    """For the bytes that `pack_experts` makes of a slot's `count` experts: where each of their parts begins, and the
    bytes of an expert in it. Experts may then be sent to other GPUs alone; scales must be of rows or of experts.
    """
    rounded: Callable[[Tensor, Role], tuple[Tensor, Tensor]] | None = None
    """(matrix [R, K], K the inner dimension of its product; role) → (the rounded values, fp32 [R, K]; a mask of clipped
    values, bool [R, K]). For reports. A method, or None.
    """
    rounded_experts: Callable[[Tensor, Role], tuple[Tensor, Tensor]] | None = None
    """The same for an operand of `grouped`: the sorted rows of an activation or a gradient [R, K], or the weights of
    all experts [E, O, I].
    """

    def linear(self, x_NI: Tensor, weight_OI: Tensor, slot: TracedSlot) -> Tensor:
        """y_NO in x's dtype, traced with its backward; no bias, no adapter."""
        raise NotImplementedError

    def state(self, slots: int, device: torch.device) -> RecipeState | None:
        """The state for this number of slots on a device, which may be ``meta``; None if the recipe has none."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSpec:
    """A precision recipe."""

    name: str
    """The value of `recipe`."""
    build: Callable[[Any, RecipeContext], Recipe]
    """(options, context) → the recipe; raises `MachineError` if the device cannot run it."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
    mistakes: Callable[[Any, Callable[[], Literal["fp32", "bf16"]]], Iterable[tuple[str, str, str]]] = (
        lambda options, dtype: ()
    )
    """(options, the model's dtype when called) → (option, what is wrong with it, the fix) of each mistake; for the
    configuration's check, before anything is built."""
    packs: bool = False
    """Whether the recipe has `pack`; read before anything is built."""
    products: Literal["bf16", "fp8", "fp4"] = "bf16"
    """Format of its products where the GPU has units for it; for the times that `surogate plan` estimates."""
    unavailable: Callable[[torch.device], str | None] = lambda device: None
    """The reason why the device cannot run the recipe natively, or None."""
