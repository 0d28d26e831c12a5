"""The losses of KTO (arXiv 2402.01306) and APO-zero for single answers (arXiv 2408.06266).

Shape suffix: N tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from surogate_core.plugin import REFERENCE, bundles, compute, ops
from surogate_task_kto.options import KTOOptions

GOOD, BAD, MISMATCHED = 1.0, -1.0, 2.0
"""Values of the column `kto_kind`, equal over a document; padding has 0."""
KIND = "kto_kind"


def token_loss(logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """[N] fp32: the negative log-probability of each label."""
    return ops.cross_entropy(logits_NV, labels_N)


def log_ratios(loss_N: Tensor, positions_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """[N]: log π/π_ref of each token's document. Where nothing is trained, loss and reference are 0."""
    return compute.document_sums(-loss_N - columns[REFERENCE], positions_N)


def kl_of(ratio_N: Tensor, starts_N: Tensor, kind_N: Tensor) -> Tensor:
    """z, 0-d: the mean log-ratio of the mismatched documents of the micro-batch, at least 0; without a gradient."""
    chosen_N = starts_N & (kind_N == MISMATCHED)
    total = torch.where(chosen_N, ratio_N.detach(), 0).sum()
    return (total / chosen_N.sum().clamp(min=1)).clamp(min=0)


def sequence_loss(options: KTOOptions, loss_N: Tensor, positions_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """0-d: the sum over the documents that are judged.

    λ_D (1 − σ(β(Δ − z))) for a good answer, λ_U (1 − σ(β(z − Δ))) for a bad one of log-ratio Δ.
    """
    ratio_N, starts_N, kind_N = (
        log_ratios(loss_N, positions_N, columns),
        compute.document_starts(positions_N),
        columns[KIND],
    )
    if options.loss_type == "kto":
        ratio_N = ratio_N - kl_of(ratio_N, starts_N, kind_N)
    good_N = options.desirable_weight * torch.sigmoid(-options.beta * ratio_N)
    bad_N = options.undesirable_weight * torch.sigmoid(options.beta * ratio_N)
    loss_N = torch.where(kind_N == GOOD, good_N, torch.where(kind_N == BAD, bad_N, 0))
    return torch.where(starts_N, loss_N, 0).sum()


COUNTS = {
    "rewards/chosen": "chosen",
    "logps/chosen": "chosen",
    "rewards/rejected": "rejected",
    "logps/rejected": "rejected",
    "kl": "mismatched",
}
"""Figure → the number of documents that it is the mean of: good answers, bad answers, mismatched documents."""
FIGURES = ("answers", "rewards/accuracies", "chosen", "rejected", "mismatched", *COUNTS)


def sequence_figures(
    options: KTOOptions, loss_N: Tensor, positions_N: Tensor, columns: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """The sums of `FIGURES`. An answer counts as accurate if the sign of its reward, less that of z, is its label's."""
    ratio_N, starts_N, kind_N = (
        log_ratios(loss_N, positions_N, columns),
        compute.document_starts(positions_N),
        columns[KIND],
    )
    above_N = ratio_N > (kl_of(ratio_N, starts_N, kind_N) if options.loss_type == "kto" else 0)
    logps_N, one_N = compute.document_sums(-loss_N, positions_N), torch.ones_like(ratio_N)
    good_N, bad_N, other_N = (starts_N & (kind_N == kind) for kind in (GOOD, BAD, MISMATCHED))
    values = [
        (good_N | bad_N, one_N),
        ((good_N & above_N) | (bad_N & ~above_N), one_N),
        *((of_kind_N, one_N) for of_kind_N in (good_N, bad_N, other_N)),
        *((of_kind_N, value_N) for of_kind_N in (good_N, bad_N) for value_N in (options.beta * ratio_N, logps_N)),
        (other_N, ratio_N),
    ]
    return tuple(torch.where(of_kind_N, value_N, 0.0).sum() for of_kind_N, value_N in values)


def objective(options: KTOOptions) -> bundles.Objective:
    """The objective of a run."""
    return bundles.Objective(
        name="kto",
        token_loss=token_loss,
        sequence_loss=partial(sequence_loss, options),
        columns=(KIND, REFERENCE),
        figures=FIGURES,
        sequence_figures=partial(sequence_figures, options),
        counts=COUNTS,
    )
