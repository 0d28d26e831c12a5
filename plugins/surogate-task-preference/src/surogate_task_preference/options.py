"""The options of the tasks: flat keys, which begin with the task's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Interval

from surogate_core.plugin import bundles

DPOLoss = Literal["sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down"]
SMOOTHED = ("sigmoid", "robust", "exo_pair")
"""The losses that read `dpo_label_smoothing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOOptions:
    """Options of direct preference optimization."""

    beta: Annotated[float, Gt(0), bundles.Flat("dpo_beta", essential=True)] = 0.1
    """Strength of the pull towards the reference; a small value lets the policy move further."""
    loss_type: Annotated[DPOLoss, bundles.Flat("dpo_loss_type", essential=True)] = "sigmoid"
    """The loss of a pair, by its name in TRL."""
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5), bundles.Flat("dpo_label_smoothing", essential=True)] = 0.0
    """Probability that the answers of a pair are interchanged in the data: for sigmoid (conservative DPO), robust and
    exo_pair."""
    sft_weight: Annotated[float, Interval(ge=0), bundles.Flat("dpo_sft_weight", essential=True)] = 0.0
    """Weight of the chosen answer's mean cross-entropy, which is added to the loss of each pair."""
    reference_free: Annotated[bool, bundles.Flat("dpo_reference_free", essential=True)] = False
    """Compare with a reference that finds every answer equally probable, instead of with the model of step 0."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a smoothing that the loss does not read, or needs and does not have."""
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            raise ValueError(f"dpo_label_smoothing has no effect with dpo_loss_type={self.loss_type}")
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            raise ValueError("dpo_loss_type=exo_pair needs a dpo_label_smoothing above 0, such as 0.001")


@dataclass(frozen=True, slots=True, kw_only=True)
class IPOOptions:
    """Options of identity preference optimization."""

    beta: Annotated[float, Gt(0), bundles.Flat("ipo_beta", essential=True)] = 0.1
    """Strength of the pull towards the reference: the margin of the mean log-ratios is trained to 1 / (2 · beta)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ORPOOptions:
    """Options of odds ratio preference optimization."""

    beta: Annotated[float, Gt(0), bundles.Flat("orpo_beta", essential=True)] = 0.1
    """Weight of the odds ratio beside the cross-entropy of the chosen answer (lambda in the paper)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPOOptions:
    """Options of simple preference optimization."""

    beta: Annotated[float, Gt(0), bundles.Flat("simpo_beta", essential=True)] = 2.0
    """Scale of the margin of the mean log-probabilities."""
    gamma: Annotated[float, Interval(ge=0), bundles.Flat("simpo_gamma", essential=True)] = 1.0
    """Margin that is asked for, after the scale: the paper's gamma, half of beta or more."""
    sft_weight: Annotated[float, Interval(ge=0), bundles.Flat("simpo_sft_weight", essential=True)] = 0.0
    """Weight of the chosen answer's mean cross-entropy, which is added to the loss of each pair (`cpo_alpha` in
    TRL)."""
