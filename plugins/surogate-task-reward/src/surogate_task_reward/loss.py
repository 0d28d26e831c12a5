"""The loss of a reward model: Bradley and Terry's, as in arXiv 2203.02155, equation 1.

The head gives one number for each token, logits [N, 1]. The score of a document is that of its last token, the only one
with a label.

Shape suffix: N tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from surogate_core.plugin import IGNORE_LABEL, bundles, compute
from surogate_task_reward.options import RewardOptions

PREFERRED = "preferred"
"""The column that tells the answers of a pair apart: 1 in the chosen document, -1 in the rejected one, 0 in padding."""


def token_loss(logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """[N] fp32: the score at the last token of each document, 0 elsewhere."""
    return torch.where(labels_N == IGNORE_LABEL, 0, logits_NV[:, 0].float())


def pair_sums(scores_N: Tensor, positions_N: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(score of the chosen answer [N], that of the rejected one [N], first token of each pair [N] bool)."""
    side_N = columns[PREFERRED]
    # The rejected document continues the pair; padding is a segment of its own.
    starts_N = (positions_N == 0) & (side_N >= 0)
    chosen_N = compute.segment_sums(torch.where(side_N > 0, scores_N, 0), starts_N)
    rejected_N = compute.segment_sums(torch.where(side_N < 0, scores_N, 0), starts_N)
    return chosen_N, rejected_N, (positions_N == 0) & (side_N > 0)


def sequence_loss(
    options: RewardOptions, scores_N: Tensor, positions_N: Tensor, columns: Mapping[str, Tensor]
) -> Tensor:
    """0-d: the sum over the pairs of −log σ(r_w − r_l − margin) + centre · (r_w + r_l)²."""
    chosen_N, rejected_N, first_N = pair_sums(scores_N, positions_N, columns)
    loss_N = -logsigmoid(chosen_N - rejected_N - options.margin)
    if options.centre:
        loss_N = loss_N + options.centre * (chosen_N + rejected_N).square()
    return torch.where(first_N, loss_N, 0).sum()


FIGURES = ("pairs", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")


def sequence_figures(scores_N: Tensor, positions_N: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The sums of `FIGURES` over the pairs; an accurate pair has the higher score at the chosen answer."""
    chosen_N, rejected_N, first_N = pair_sums(scores_N, positions_N, columns)
    values = (torch.ones_like(chosen_N), chosen_N > rejected_N, chosen_N - rejected_N, chosen_N, rejected_N)
    return tuple(torch.where(first_N, value_N.float(), 0).sum() for value_N in values)


def objective(options: RewardOptions) -> bundles.Objective:
    """The objective of a run."""
    return bundles.Objective(
        name="reward",
        token_loss=token_loss,
        sequence_loss=partial(sequence_loss, options),
        columns=(PREFERRED,),
        figures=FIGURES,
        sequence_figures=sequence_figures,
    )
