"""Objectives: the loss of a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A task's loss, per token; the engine chunks it over tokens and averages over label tokens."""

    name: str
    """The value of the key `objective`."""
    token_loss: Callable[[Tensor, Tensor], Tensor]
    """(logits_NV in compute dtype, labels_N int64) → loss_N fp32; 0 where the label is -100.
    Traced: plain torch ops only, differentiable in the logits."""
