"""Objectives: the loss of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A task's loss, per token; the engine chunks it over tokens and divides the sum by the step's divisor."""

    name: str
    """The value of the key `objective`."""
    token_loss: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
    """(logits_NV in compute dtype, labels_N int64, columns) → loss_N fp32; 0 where the label is -100.
    Traced: plain torch ops only, differentiable in the logits. A token's loss depends on its own row only."""
    columns: tuple[str, ...] = ()
    """Names of the per-token columns that it reads, each [N] fp32, such as ``advantages``. The task puts them into
    every micro-batch. A column ``weights`` need not be declared: the engine multiplies each token's loss by it."""
    sequence_loss: Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor] | None = None
    """For a loss that is not a sum over tokens, such as one over whole sequences: (token losses [N] fp32 of the
    micro-batch, positions_N, columns) → the summed loss, 0-d fp32. The head then runs twice: the first pass
    computes the token losses, this function's gradient with respect to each of them is that token's coefficient,
    and the second pass differentiates with these coefficients. Traced like `token_loss`; a document begins where
    its position is 0."""
