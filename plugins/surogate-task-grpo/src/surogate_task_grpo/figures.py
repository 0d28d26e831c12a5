"""The figures that a step of reinforcement learning reports beside its loss.

Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surogate_core.batch import IGNORE_LABEL
from surogate_task_grpo.options import GRPOOptions
from surogate_task_grpo.terms import (
    Documents,
    clipped,
    divergence,
    gap,
    importance_weights,
)

if TYPE_CHECKING:
    from torch import Tensor

ENTROPY, KL = "entropy", "kl"
GAP, LARGEST_GAP = "logprob_gap/mean", "logprob_gap/max"
"""|log π before the step - log μ| of the sampled tokens: rollout engine and trainer compute them differently."""
IMPORTANCE = ("importance/mean", "importance/truncated")
"""The importance weights before they are cut, and the share that is cut."""
CLIPPED = ("clip_ratio/low", "clip_ratio/high", "clip_ratio/region")
"""Shares: of ratios that have fallen, or risen, so far that they have no gradient, and their sum."""
COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class Figures:
    """Names and functions, as `Objective` takes them."""

    options: GRPOOptions
    of_tokens: tuple[str, ...]
    of_sequences: tuple[str, ...]
    """Figures of whole completions, the first of which is their number; empty if there are none."""
    largest: tuple[str, ...] = (LARGEST_GAP,)

    def tokens(self, logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """[N] for each of `of_tokens`."""
        import torch

        from surogate_core.kernels.ops import wide

        # Written so that Inductor fuses it into reductions over the logits.
        scaled_NV = wide(logits_NV) / self.options.temperature
        lse_N1 = torch.logsumexp(scaled_NV, dim=-1, keepdim=True)
        index_N1 = labels_N.masked_fill(labels_N == IGNORE_LABEL, 0)[:, None]
        logp_N = (wide(logits_NV.gather(1, index_N1)) / self.options.temperature - lse_N1)[:, 0]
        logprobs_NV = scaled_NV - lse_N1
        # A token with probability 0 has no part in the entropy.
        entropy_N = -(logprobs_NV.exp() * logprobs_NV.clamp(min=-1e4)).sum(-1)
        gap_N = gap(logp_N, columns).abs()
        found = {ENTROPY: entropy_N, GAP: gap_N, LARGEST_GAP: gap_N}
        if KL in self.of_tokens:
            found[KL] = divergence(self.options, logp_N, columns)
        return self._chosen(self.of_tokens, found, logp_N, columns, None)

    def sequences(self, losses_N: Tensor, positions_N: Tensor, columns: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """0-d sums over completions for each of `of_sequences`; `losses_N` are negative log-probabilities."""
        documents = Documents.of(positions_N, columns)
        share_N = documents.trained_N / documents.count_N
        values = self._chosen(self.of_sequences[1:], {}, -losses_N, columns, documents)
        return [share_N.sum().round(), *((value_N * share_N).sum() for value_N in values)]

    def _chosen(
        self,
        names: Sequence[str],
        found: dict[str, Tensor],
        logp_N: Tensor,
        columns: Mapping[str, Tensor],
        documents: Documents | None,
    ) -> list[Tensor]:
        if IMPORTANCE[0] in names:
            weights_N = importance_weights(self.options, logp_N, columns, documents)
            found |= zip(IMPORTANCE, (weights_N, (weights_N > self.options.importance_clip).float()), strict=True)
        if CLIPPED[0] in names:
            fallen_N, risen_N = (where_N.float() for where_N in clipped(self.options, logp_N, columns, documents))
            found |= zip(CLIPPED, (fallen_N, risen_N, fallen_N + risen_N), strict=True)
        return [found[name] for name in names]


def figures(options: GRPOOptions) -> Figures:
    """The figures of a run."""
    kind = options.loss_type
    of_tokens = [ENTROPY, GAP, LARGEST_GAP]
    of_sequences: list[str] = []
    if options.beta > 0:
        of_tokens.append(KL)
    if kind != "dppo" and options.importance_correction != "none":
        (of_sequences if options.importance_correction == "sequence" else of_tokens).extend(IMPORTANCE)
    # At the first and only iteration every ratio is 1; dppo compares with the rollout engine.
    if options.num_iterations > 1 or kind == "dppo":
        (of_sequences if kind in ("gspo", "rloo") else of_tokens).extend(CLIPPED)
    return Figures(options, tuple(of_tokens), (COMPLETIONS, *of_sequences) if of_sequences else ())
