"""The loss of distillation: cross-entropy, and the KL divergence from the teacher's most probable tokens.

The divergence is over K + 1 outcomes: each of the K tokens, and all other tokens together. It is at most the divergence
over the whole vocabulary, and 0 where the student gives the K tokens the teacher's probabilities.

Shape suffixes: N tokens of a chunk, V vocabulary, K most probable tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from surogate_core.plugin import IGNORE_LABEL, bundles
from surogate_task_distill.options import DistillOptions

FIGURES = ("ce", "kl", "agreement")


def id_columns(top_k: int) -> tuple[str, ...]:
    """Names of the columns of the teacher's tokens, the most probable one first."""
    return tuple(f"teacher_id_{k:04}" for k in range(top_k))


def logprob_columns(top_k: int) -> tuple[str, ...]:
    """Names of the columns of their log-probabilities at temperature τ."""
    return tuple(f"teacher_logprob_{k:04}" for k in range(top_k))


def _teacher(columns: Mapping[str, Tensor], top_k: int) -> tuple[Tensor, Tensor]:
    """(tokens [N, K] int64, log-probabilities [N, K] fp32)."""
    ids_NK = torch.stack([columns[name] for name in id_columns(top_k)], -1).long()
    return ids_NK, torch.stack([columns[name] for name in logprob_columns(top_k)], -1)


def divergence(logits_NV: Tensor, ids_NK: Tensor, teacher_NK: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(KL(teacher ‖ student) [N], log of the student's normaliser [N]), of the logits divided by the temperature."""
    logits_NV = logits_NV.float() / temperature
    top_NK = logits_NV.gather(-1, ids_NK)
    rest_N = logits_NV.scatter(-1, ids_NK, -torch.inf).logsumexp(-1)
    norm_N = torch.logaddexp(top_NK.logsumexp(-1), rest_N)
    q_NK = teacher_NK.exp()
    left_N = (1 - q_NK.sum(-1)).clamp(min=0)
    kl_N = (q_NK * (teacher_NK - top_NK + norm_N[:, None])).sum(-1)
    rest_N = torch.where(left_N > 0, left_N.clamp(min=1e-30).log() - rest_N + norm_N, 0)
    return kl_N + left_N * rest_N, norm_N


def terms(
    options: DistillOptions, logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """(cross-entropy [N], KL divergence [N]); 0 where the label is -100."""
    trained_N = labels_N != IGNORE_LABEL
    ids_NK, teacher_NK = _teacher(columns, options.top_k)
    kl_N, norm_N = divergence(logits_NV, ids_NK, teacher_NK, options.temperature)
    if options.temperature != 1:
        norm_N = logits_NV.float().logsumexp(-1)
    label_N = logits_NV.gather(-1, labels_N.clamp(min=0)[:, None]).squeeze(-1).float()
    return torch.where(trained_N, norm_N - label_N, 0), torch.where(trained_N, kl_N, 0)


def token_loss(options: DistillOptions, logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """[N] fp32: ce_weight · CE + kd_weight · τ² · KL."""
    ce_N, kl_N = terms(options, logits_NV, labels_N, columns)
    return options.cross_entropy * ce_N + options.kd_weight * options.temperature**2 * kl_N


def token_figures(
    options: DistillOptions, logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """`FIGURES` of each token: CE, KL, and whether student and teacher have the same most probable token."""
    ce_N, kl_N = terms(options, logits_NV, labels_N, columns)
    best_N = columns[id_columns(options.top_k)[0]].long()
    agrees_N = (logits_NV.argmax(-1) == best_N) & (labels_N != IGNORE_LABEL)
    return ce_N, kl_N, agrees_N.float()


def objective(options: DistillOptions) -> bundles.Objective:
    """The objective of a run."""
    return bundles.Objective(
        name="distill",
        token_loss=partial(token_loss, options),
        columns=(*id_columns(options.top_k), *logprob_columns(options.top_k)),
        figures=FIGURES,
        token_figures=partial(token_figures, options),
    )
