"""Objectives: the loss of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surogate_core.bundles.options import NoOptions, options_from_flat

if TYPE_CHECKING:
    from torch import Tensor

    from surogate_core.bundles.handed import RunKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A task's loss, per token; the engine chunks it over tokens and divides the sum by the step's divisor."""

    name: str
    """Name of the objective in events and messages: the name of its `ObjectiveSpec`, or of the task that has it."""
    token_loss: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
    """(logits_NV in compute dtype, labels_N int64, columns) → loss_N fp32; 0 where the label is -100.
    Traced: plain torch ops only, differentiable in the logits. A token's loss depends on its own row only."""
    columns: tuple[str, ...] = ()
    """Names of the per-token columns that it reads, each [N] fp32, such as ``advantages``. The task puts them into
    every micro-batch. A column ``weights`` need not be declared: the engine multiplies each token's loss by it."""
    sequence_loss: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor] | None = None
    """For a loss that is not a sum over tokens, such as one over whole sequences: (token losses [N] fp32 of the
    micro-batch, positions_N, columns) → the summed loss, 0-d fp32. This function's gradient with respect to each
    token's loss is that token's coefficient. A head that is trained runs twice: the first pass computes the token
    losses, and the second one differentiates with these coefficients. A frozen head runs once, and the coefficients
    multiply the gradients of the hidden states. Traced like `token_loss`; a document begins where its position is
    0."""
    figures: tuple[str, ...] = ()
    """Names of its figures, which steps and evaluations report beside the loss: first the names for `token_figures`,
    then for `sequence_figures`."""
    token_figures: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Sequence[Tensor]] | None = None
    """(logits_NV, labels_N, columns) → [N] fp32 for each figure, such as the entropy. Traced with the head, without
    gradient. A figure is the mean over the label tokens of the step, or the maximum if it is one of `largest`."""
    sequence_figures: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Sequence[Tensor]] | None = None
    """(token losses [N] fp32 of the micro-batch, positions_N, columns) → 0-d sums. The first is a count, such as the
    pairs of the micro-batch; the step reports its sum, and the other sums divided by it."""
    count: str | None = None
    """Name of the count, where there are figures of both kinds; otherwise it is the first of `figures`."""
    counts: Mapping[str, str] = field(default_factory=dict)
    """Sequence figure → the sequence figure that is its count instead, such as the chosen answers alone. A step in
    which this count is 0 has no such figure."""
    largest: tuple[str, ...] = ()
    """The token figures of which a step reports the maximum over the label tokens instead of the mean."""
    label: str = ""
    """How messages name the loss and the plugin that offers it, where it is not the task's own."""

    def __post_init__(self) -> None:
        both = self.token_figures is not None and self.sequence_figures is not None
        if bool(self.figures) != (self.token_figures is not None or self.sequence_figures is not None):
            raise TypeError(f"objective {self.name}: `figures` names what `token_figures` and `sequence_figures` give")
        if both and self.count not in self.figures:
            raise TypeError(f"objective {self.name}: `count` must name the first of the sequence figures")
        if {*self.counts, *self.counts.values()} - set(self.figures[self.of_tokens :]):
            raise TypeError(f"objective {self.name}: `counts` names figures that `sequence_figures` does not give")
        if set(self.largest) - set(self.figures[: self.of_tokens]):
            raise TypeError(f"objective {self.name}: `largest` names figures that `token_figures` does not give")

    @property
    def of_tokens(self) -> int:
        """How many of `figures` `token_figures` returns; `sequence_figures` returns the others."""
        if self.token_figures is None or self.sequence_figures is None:
            return 0 if self.token_figures is None else len(self.figures)
        assert self.count is not None
        return self.figures.index(self.count)

    def means(self, sums: Sequence[float], *, label_tokens: int) -> dict[str, float]:
        """Name → figure, from the sums, and maxima, of `figures`; empty if nothing carries loss."""
        if not label_tokens:
            return {}
        values = dict(zip(self.figures, sums, strict=True))
        usual = self.figures[self.of_tokens] if self.of_tokens < len(self.figures) else ""
        counted = {usual, *self.counts.values()}
        found = {}
        for place, (name, value) in enumerate(values.items()):
            if name in self.largest or name in counted:
                found[name] = value
            elif place < self.of_tokens:
                found[name] = value / label_tokens
            elif name not in self.counts:
                found[name] = value / (values[usual] or 1.0)
            elif count := values[self.counts[name]]:
                found[name] = value / count
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec:
    """An objective, for the tasks that have none of their own."""

    name: str
    """The value of the key `objective`."""
    build: Callable[[Any], Objective]
    """Options → the objective, of the same name. Equal options give an equal loss."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default. Flat keys set them."""

    def options_of(self, config: RunKeys) -> Any:
        """The options, which flat keys of the configuration set."""
        return options_from_flat(self.options, config.flat)
