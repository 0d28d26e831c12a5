"""Losses of a chosen and a rejected answer, from the losses of their tokens.

Shape suffix: N tokens of a micro-batch. A value of a pair is at every token of its two documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from surogate_core.plugin import REFERENCE, bundles, compute, ops

if TYPE_CHECKING:
    from torch import Tensor

    from surogate_task_preference.options import DPOOptions, IPOOptions, ORPOOptions, SimPOOptions

PREFERRED = "preferred"
"""The column that tells the answers of a pair apart: 1 in the chosen document, -1 in the rejected one, 0 in padding."""
TRAINED = "trained"
"""The column that is 1 where a position has a label."""
FIGURES = (
    "pairs",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
"""The number of pairs, and the means over them: rewards, their difference, the share of pairs in which the chosen
answer has the higher reward, and the log-probabilities of the answers."""

Columns = Mapping[str, "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A value of both answers of each pair."""

    chosen_N: Tensor
    rejected_N: Tensor

    @property
    def margin(self) -> Tensor:
        """The difference."""
        return self.chosen_N - self.rejected_N

    def __truediv__(self, other: Answers) -> Answers:
        """The quotients."""
        return Answers(chosen_N=self.chosen_N / other.chosen_N, rejected_N=self.rejected_N / other.rejected_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The pairs of a micro-batch."""

    losses_N: Tensor
    positions_N: Tensor
    columns: Columns

    @property
    def first(self) -> Tensor:
        """[N] bool: the first token of each pair."""
        return (self.positions_N == 0) & (self.columns[PREFERRED] > 0)

    def sums(self, values_N: Tensor) -> Answers:
        """The sum of a value over each answer."""
        side_N = self.columns[PREFERRED]
        # The rejected document continues the pair; padding is a segment of its own.
        starts_N = (self.positions_N == 0) & (side_N >= 0)
        zero = torch.zeros_like(values_N)
        return Answers(
            chosen_N=compute.segment_sums(torch.where(side_N > 0, values_N, zero), starts_N),
            rejected_N=compute.segment_sums(torch.where(side_N < 0, values_N, zero), starts_N),
        )

    def logprobs(self) -> Answers:
        """The log-probability of each answer."""
        return self.sums(-self.losses_N)

    def ratios(self) -> Answers:
        """The log-ratio of each answer to the reference; of the differences of tokens, which are small."""
        reference_N = self.columns.get(REFERENCE)
        return self.sums(-self.losses_N if reference_N is None else -self.losses_N - reference_N)

    def lengths(self) -> Answers:
        """The number of trained tokens of each answer, at least 1."""
        found = self.sums(self.columns[TRAINED])
        return Answers(chosen_N=found.chosen_N.clamp(min=1), rejected_N=found.rejected_N.clamp(min=1))

    def total(self, values_N: Tensor) -> Tensor:
        """0-d: the sum of a value over the pairs."""
        return torch.where(self.first, values_N, torch.zeros_like(values_N)).sum()


PairLoss = Callable[[Pairs], "Tensor"]
"""Pairs → the loss of each, at every token of it."""
Rewards = Callable[[Pairs], Answers]


def objective(name: str, loss: PairLoss, rewards: Rewards, columns: tuple[str, ...]) -> bundles.Objective:
    """The objective that sums a loss over the pairs of a micro-batch."""

    def sequence_loss(losses_N: Tensor, positions_N: Tensor, columns: Columns) -> Tensor:
        pairs = Pairs(losses_N=losses_N, positions_N=positions_N, columns=columns)
        return pairs.total(loss(pairs))

    return bundles.Objective(
        name=name,
        token_loss=_token_loss,
        columns=(PREFERRED, *columns),
        sequence_loss=sequence_loss,
        figures=FIGURES,
        sequence_figures=figures_of(rewards),
    )


def _token_loss(logits_NV: Tensor, labels_N: Tensor, columns: Columns) -> Tensor:
    return ops.cross_entropy(logits_NV, labels_N)


def figures_of(rewards: Rewards) -> Callable[[Tensor, Tensor, Columns], tuple[Tensor, ...]]:
    """The sums over a micro-batch's pairs that `FIGURES` names."""

    def figures(losses_N: Tensor, positions_N: Tensor, columns: Columns) -> tuple[Tensor, ...]:
        pairs = Pairs(losses_N=losses_N, positions_N=positions_N, columns=columns)
        found, logprobs = rewards(pairs), pairs.logprobs()
        values = (
            torch.ones_like(losses_N),
            found.chosen_N,
            found.rejected_N,
            found.margin,
            (found.margin > 0).float(),
            logprobs.chosen_N,
            logprobs.rejected_N,
        )
        return tuple(pairs.total(value) for value in values)

    return figures


def _scaled(answers: Answers, scale: float) -> Answers:
    return Answers(chosen_N=scale * answers.chosen_N, rejected_N=scale * answers.rejected_N)


def _mean_loss(pairs: Pairs) -> Tensor:
    """The mean cross-entropy of each chosen answer."""
    return -(pairs.logprobs() / pairs.lengths()).chosen_N


# ----------------------------------------------------------------------------------------- DPO


def dpo(options: DPOOptions) -> bundles.Objective:
    """Rafailov et al., 2305.18290, and the losses that TRL offers beside it."""

    def loss(pairs: Pairs) -> Tensor:
        found = _DPO[options.loss_type](pairs, options)
        return found + options.sft_weight * _mean_loss(pairs) if options.sft_weight else found

    lengths = (TRAINED,) if options.loss_type == "ipo" or options.sft_weight else ()
    reference = () if options.reference_free else (REFERENCE,)
    return objective("dpo", loss, lambda pairs: _scaled(pairs.ratios(), options.beta), (*reference, *lengths))


def _sigmoid(pairs: Pairs, options: DPOOptions) -> Tensor:
    """With a smoothing, conservative DPO (Mitchell, 2023)."""
    margin_N, smoothing = options.beta * pairs.ratios().margin, options.label_smoothing
    loss_N = -(1 - smoothing) * logsigmoid(margin_N)
    return loss_N - smoothing * logsigmoid(-margin_N) if smoothing else loss_N


def _hinge(pairs: Pairs, options: DPOOptions) -> Tensor:
    """Zhao et al., 2305.10425."""
    return torch.relu(1 - options.beta * pairs.ratios().margin)


def _ipo(pairs: Pairs, options: DPOOptions) -> Tensor:
    return _identity(pairs, options.beta)


def _identity(pairs: Pairs, beta: float) -> Tensor:
    """Azar et al., 2310.12036, equation 17, with mean log-ratios, as in the paper's experiments."""
    return ((pairs.ratios() / pairs.lengths()).margin - 1 / (2 * beta)).square()


def _robust(pairs: Pairs, options: DPOOptions) -> Tensor:
    """Chowdhury et al., 2403.00409."""
    margin_N, smoothing = options.beta * pairs.ratios().margin, options.label_smoothing
    return (smoothing * logsigmoid(-margin_N) - (1 - smoothing) * logsigmoid(margin_N)) / (1 - 2 * smoothing)


def _exo_pair(pairs: Pairs, options: DPOOptions) -> Tensor:
    """Ji et al., 2402.00856, equation 16."""
    margin_N, smoothing = options.beta * pairs.ratios().margin, options.label_smoothing
    log_w_N, log_l_N = logsigmoid(margin_N), logsigmoid(-margin_N)
    return log_w_N.exp() * (log_w_N - math.log1p(-smoothing)) + log_l_N.exp() * (log_l_N - math.log(smoothing))


def _nca_pair(pairs: Pairs, options: DPOOptions) -> Tensor:
    """Chen et al., 2402.05369."""
    rewards = _scaled(pairs.ratios(), options.beta)
    pushed_N = logsigmoid(-rewards.chosen_N) + logsigmoid(-rewards.rejected_N)
    return -logsigmoid(rewards.chosen_N) - 0.5 * pushed_N


def _sppo_hard(pairs: Pairs, options: DPOOptions) -> Tensor:
    """Wu et al., 2405.00675, with the chosen answer's probability of 1."""
    ratios, half = pairs.ratios(), 0.5 / options.beta
    return (ratios.chosen_N - half).square() + (ratios.rejected_N + half).square()


def _apo_zero(pairs: Pairs, options: DPOOptions) -> Tensor:
    """D'Oosterlinck et al., 2408.06266, equation 7: the chosen answers are better than the model's."""
    rewards = _scaled(pairs.ratios(), options.beta)
    return 1 - torch.sigmoid(rewards.chosen_N) + torch.sigmoid(rewards.rejected_N)


def _apo_down(pairs: Pairs, options: DPOOptions) -> Tensor:
    """The same, equation 8: the model's answers are better than the chosen ones."""
    rewards = _scaled(pairs.ratios(), options.beta)
    return torch.sigmoid(rewards.chosen_N) + 1 - torch.sigmoid(rewards.margin)


_DPO: Mapping[str, Callable[[Pairs, DPOOptions], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}


# -------------------------------------------------------------------------------------- others


def ipo(options: IPOOptions) -> bundles.Objective:
    """Identity preference optimization: the margin of the mean log-ratios has a target."""
    return objective(
        "ipo",
        lambda pairs: _identity(pairs, options.beta),
        lambda pairs: _scaled(pairs.ratios(), options.beta),
        (REFERENCE, TRAINED),
    )


def orpo(options: ORPOOptions) -> bundles.Objective:
    """Hong et al., 2403.07691: cross-entropy of the chosen answer, and the ratio of the answers' odds."""

    def means(pairs: Pairs) -> Answers:
        return pairs.logprobs() / pairs.lengths()

    def loss(pairs: Pairs) -> Tensor:
        found = means(pairs)
        odds = Answers(chosen_N=_log_odds(found.chosen_N), rejected_N=_log_odds(found.rejected_N))
        return -found.chosen_N - options.beta * logsigmoid(odds.margin)

    return objective("orpo", loss, lambda pairs: _scaled(means(pairs), options.beta), (TRAINED,))


def _log_odds(logprob_N: Tensor) -> Tensor:
    """log(p / (1 - p)) of a log-probability."""
    logprob_N = logprob_N.clamp(max=-1e-6)  # of a certain answer it would be infinite
    # Mächler, "Accurately computing log(1 - exp(-|a|))", 2012
    near_N = torch.log(-torch.expm1(logprob_N.clamp(min=-1.0)))
    far_N = torch.log1p(-torch.exp(logprob_N.clamp(max=-0.5)))
    return logprob_N - torch.where(logprob_N > -math.log(2), near_N, far_N)


def simpo(options: SimPOOptions) -> bundles.Objective:
    """Meng et al., 2405.14734: the margin of mean log-probabilities, with a target and without a reference."""

    def means(pairs: Pairs) -> Answers:
        return pairs.logprobs() / pairs.lengths()

    def loss(pairs: Pairs) -> Tensor:
        found_N = -logsigmoid(options.beta * means(pairs).margin - options.gamma)
        return found_N + options.sft_weight * _mean_loss(pairs) if options.sft_weight else found_N

    return objective("simpo", loss, lambda pairs: _scaled(means(pairs), options.beta), (TRAINED,))
