"""The figures that a step of reinforcement learning reports beside its loss.

Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surogate_core.plugin import IGNORE_LABEL, PluginError
from surogate_core.service.plugins import fault
from surogate_reinforcement.policy_terms import CompletionSums, divergence, gap, importance_weights, terms

if TYPE_CHECKING:
    from torch import Tensor

    from surogate_core.plugin import bundles
    from surogate_reinforcement.policy import Policy

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

    policy: Policy
    of_tokens: tuple[str, ...]
    of_sequences: tuple[str, ...]
    """Figures of whole completions, the first of which is their number; empty if there are none."""
    largest: tuple[str, ...] = (LARGEST_GAP,)

    def tokens(self, logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """[N] for each of `of_tokens`."""
        import torch

        from surogate_core.plugin import ops

        # Written so that Inductor fuses it into reductions over the logits.
        scaled_NV = ops.wide(logits_NV) / self.policy.settings.temperature
        lse_N1 = torch.logsumexp(scaled_NV, dim=-1, keepdim=True)
        index_N1 = labels_N.masked_fill(labels_N == IGNORE_LABEL, 0)[:, None]
        logp_N = (ops.wide(logits_NV.gather(1, index_N1)) / self.policy.settings.temperature - lse_N1)[:, 0]
        logprobs_NV = scaled_NV - lse_N1
        # A token with probability 0 has no part in the entropy.
        entropy_N = -(logprobs_NV.exp() * logprobs_NV.clamp(min=-1e4)).sum(-1)
        gap_N = gap(logp_N, columns).abs()
        found = {ENTROPY: entropy_N, GAP: gap_N, LARGEST_GAP: gap_N}
        if KL in self.of_tokens:
            found[KL] = divergence(self.policy.settings, logp_N, columns)
        return self._chosen(self.of_tokens, found, logp_N, columns, None)

    def sequences(self, losses_N: Tensor, positions_N: Tensor, columns: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """0-d sums over completions for each of `of_sequences`; `losses_N` are negative log-probabilities."""
        documents = CompletionSums.of(positions_N, columns)
        share_N = documents.trained_N / documents.count_N
        values = self._chosen(self.of_sequences[1:], {}, -losses_N, columns, documents)
        return [share_N.sum().round(), *((value_N * share_N).sum() for value_N in values)]

    def _chosen(
        self,
        names: Sequence[str],
        found: dict[str, Tensor],
        logp_N: Tensor,
        columns: Mapping[str, Tensor],
        documents: CompletionSums | None,
    ) -> list[Tensor]:
        settings = self.policy.settings
        if IMPORTANCE[0] in names:
            weights_N = importance_weights(settings, logp_N, columns, documents)
            found |= zip(IMPORTANCE, (weights_N, (weights_N > settings.importance_clip).float()), strict=True)
        own = [name for name in self.policy.loss.figures if name in names]
        if own or CLIPPED[0] in names:
            seen = terms(self.policy.part, settings, logp_N.detach(), columns, documents)
            found |= {name: self._own(name, seen) for name in own}
        if CLIPPED[0] in names:
            fallen_N, risen_N = self._clipped(seen)
            found |= zip(CLIPPED, (fallen_N, risen_N, fallen_N + risen_N), strict=True)
        return [found[name] for name in names]

    def _clipped(self, seen: bundles.PolicyTerms) -> tuple[Tensor, Tensor]:
        """[N] each: 1 where a ratio fell too far, and where one rose too far, otherwise 0."""
        assert self.policy.loss.clipped is not None
        fallen_N, risen_N = self.policy.loss.clipped(seen)
        return fallen_N.float(), risen_N.float()

    def _own(self, name: str, seen: bundles.PolicyTerms) -> Tensor:
        """[N]: a figure of the policy loss's own."""
        part = self.policy.part
        try:
            found_N = self.policy.loss.figures[name](seen)
        except PluginError:
            raise
        except Exception as error:
            raise PluginError(f"{part.label}: its figure {name} failed: {fault(error)}") from error
        if found_N.shape != seen.logp_N.shape:
            raise PluginError(
                f"{part.label}: its figure {name} has the shape {list(found_N.shape)}, not {list(seen.logp_N.shape)}."
            )
        return found_N.float()


def figures(policy: Policy) -> Figures:
    """The figures of a run. Raises `PluginError` where the loss names one of its own as another is named."""
    loss, settings = policy.loss, policy.settings
    of_tokens = [ENTROPY, GAP, LARGEST_GAP]
    of_sequences: list[str] = []
    if settings.beta > 0:
        of_tokens.append(KL)
    if policy.weighted:
        (of_sequences if settings.importance_correction == "sequence" else of_tokens).extend(IMPORTANCE)
    if loss.clipped is not None and policy.moves:
        of_completions = loss.ratio != "token" or loss.sums_completions
        (of_sequences if of_completions else of_tokens).extend(CLIPPED)
    if taken := sorted({*loss.figures} & {ENTROPY, GAP, LARGEST_GAP, KL, COMPLETIONS, *IMPORTANCE, *CLIPPED}):
        raise PluginError(
            f"{policy.part.label}: every policy loss has the figure {taken[0]}; its own needs another name."
        )
    (of_sequences if policy.by_sequence else of_tokens).extend(loss.figures)
    return Figures(policy, tuple(of_tokens), (COMPLETIONS, *of_sequences) if of_sequences else ())
