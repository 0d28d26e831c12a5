"""The keys of the task `distill`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Interval

from surogate_core.plugin import bundles


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    """Keys of `task=distill`."""

    teacher: Annotated[str | None, bundles.Flat("distill_teacher")] = None
    """The teacher: a model's directory, a run, an adapter, or a hub id. It must have the tokenizer of `model`."""
    top_k: Annotated[int, Interval(ge=1, le=1024), bundles.Flat("distill_top_k")] = 32
    """Most probable tokens of the teacher that are kept for each trained token; 6 bytes each in the data cache."""
    temperature: Annotated[float, Gt(0), bundles.Flat("distill_temperature")] = 1.0
    """τ: the logits of both models are divided by it before their distributions are compared."""
    kd_weight: Annotated[float, Ge(0), bundles.Flat("distill_kd_weight")] = 0.5
    """Weight of the KL divergence from the teacher, which is multiplied by τ²."""
    ce_weight: Annotated[float | None, Ge(0), bundles.Flat("distill_ce_weight")] = None
    """Weight of the cross-entropy with the data's own tokens; null: 1 − `distill_kd_weight`, at least 0."""

    @property
    def cross_entropy(self) -> float:
        """The weight of the cross-entropy."""
        return max(0.0, 1 - self.kd_weight) if self.ce_weight is None else self.ce_weight
