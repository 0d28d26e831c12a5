"""A policy loss with the settings of a run, as an objective over the columns of a micro-batch.

The columns, each 0 where the label is -100:

- ``advantages``: of the token's completion.
- ``behaviour_logprobs``: log-probability of the token when it was sampled, as the rollout engine computed it, at the
  sampling temperature. A value that is not finite counts as equal to the trainer's.
- ``old_logprobs``, with several iterations: the same before the first optimizer step on these completions, as the
  trainer computes it. With one iteration it is the model's own, held constant.
- ``reference_logprobs``, where beta > 0: the same of the reference model.
- ``weights``: the weight of the token in the sum over the step, from `Policy.aggregation`.

With π the model, `old` the old and μ the behaviour probabilities, the loss of a token is
w · `PolicyLoss.loss` + beta · KL(π, reference), where w = min(old / μ, importance_clip) unless the loss is not
`corrected`, and the divergence is in the rewards instead where `PolicyLoss.kl` says so.

Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surogate_core.plugin import IGNORE_LABEL, WEIGHTS, PluginError, bundles
from surogate_core.service.plugins import fault
from surogate_reinforcement.policy_figures import figures
from surogate_reinforcement.policy_terms import (
    ADVANTAGES,
    BEHAVIOUR,
    OLD,
    REFERENCE,
    CompletionSums,
    PolicySettings,
    divergence,
    importance_weights,
    terms,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Divided:
    """How a micro-batch counts in the loss of its step."""

    weights: tuple[float, ...]
    """The weight of every trained token of each of its documents."""
    divisor: float
    """`MicroBatch.divisor`."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy loss with the settings of a run. Raises `PluginError` where the loss is not a `PolicyLoss`."""

    part: bundles.Part
    settings: PolicySettings

    def __post_init__(self) -> None:
        if not isinstance(self.part.built, bundles.PolicyLoss):
            raise PluginError(f"{self.part.label}: `build` returned {self.part.built!r:.80}, not a PolicyLoss.")

    @property
    def loss(self) -> bundles.PolicyLoss:
        """The parts of the loss."""
        found: bundles.PolicyLoss = self.part.built
        return found

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that the loss reads, besides ``weights``."""
        found = [ADVANTAGES, BEHAVIOUR]
        found += [OLD] if self.settings.num_iterations > 1 else []
        return (*found, *([REFERENCE] if self.settings.beta > 0 else []))

    @property
    def weighted(self) -> bool:
        """Whether importance weights multiply the loss."""
        return self.loss.corrected and self.settings.importance_correction != "none"

    @property
    def moves(self) -> bool:
        """Whether a ratio can differ from 1: at the first and only iteration π is the old policy."""
        return self.settings.num_iterations > 1 or self.loss.against == "behaviour"

    @property
    def by_sequence(self) -> bool:
        """Whether the loss needs sums over whole completions, for which the head runs twice.

        Where ratios are 1, they are so whether they are of a token or of a completion, and need none.
        """
        ratios = self.loss.ratio != "token" and self.moves
        weights = self.weighted and self.settings.importance_correction == "sequence"
        return ratios or weights or self.loss.sums_completions

    def trial(self, moved: float, advantage: float) -> tuple[Tensor, Tensor]:
        """(loss, its gradient by log π), [N] each, of a completion whose tokens' log π have moved by `moved`.

        Raises `PluginError` if the loss fails, or if it or its gradient is not finite.
        """
        import torch

        leaf_N = torch.full((4,), -1.5 + min(moved, 0.0)).requires_grad_()
        past_N, ones_N = leaf_N.detach() - moved, torch.ones(4)
        found = {ADVANTAGES: advantage * ones_N, BEHAVIOUR: past_N, OLD: past_N}
        columns = {name: found[name] for name in self.columns if name in found} | {WEIGHTS: ones_N}
        documents = CompletionSums.of(torch.arange(4), columns) if self.by_sequence else None
        loss_N = _Traced(self).policy_loss(leaf_N, columns, documents)
        where = f"for tokens whose log-probability has moved by {moved:g}, with an advantage of {advantage:g}"
        if not loss_N.isfinite().all():
            raise PluginError(f"{self.part.label} returned {loss_N.tolist()} {where}; a loss must be finite.")
        if not loss_N.requires_grad:
            raise PluginError(f"{self.part.label} does not depend on log π {where}, so nothing would be trained.")
        (gradient_N,) = torch.autograd.grad(loss_N.sum(), [leaf_N], materialize_grads=True)
        if not gradient_N.isfinite().all():
            raise PluginError(f"{self.part.label} has the gradient {gradient_N.tolist()} by log π {where}.")
        return loss_N.detach(), gradient_N

    def check(self) -> None:
        """Raise `PluginError` if the loss fails, or is not finite, on a few tokens near the old policy."""
        for moved in (-0.1, 0.0, 0.1):
            for advantage in (-1.0, 0.0, 1.0):
                self.trial(moved, advantage)

    def objective(self) -> bundles.Objective:
        """The objective of a run."""
        traced, measured = _Traced(self), figures(self)
        whole = self.by_sequence
        return bundles.Objective(
            name=self.part.name,
            label=self.part.label,
            token_loss=traced.negative_logprobs if whole else traced.of_tokens,
            columns=self.columns,
            sequence_loss=traced.of_sequences if whole else None,
            figures=(*measured.of_tokens, *measured.of_sequences),
            token_figures=measured.tokens,
            sequence_figures=measured.sequences if measured.of_sequences else None,
            count=measured.of_sequences[0] if measured.of_sequences else None,
            largest=measured.largest,
        )

    def aggregation(self, batches: Sequence[Sequence[int]], completions: int) -> list[Divided]:
        """The weights of tokens, and the divisors, of a step's micro-batches.

        `batches`: of each micro-batch the trained tokens of each document, at least 1. `completions`: documents of the
        step, those included that are left out because they are truncated; they count where a loss is averaged over
        completions.

        Raises `PluginError` for weights or a divisor that cannot be ones.
        """
        documents = sum(map(len, batches))
        assert completions >= documents, f"{completions} completions, {documents} documents"
        found = []
        # Those that are left out are counted with the first micro-batch: only the sum over the step matters.
        left_out = completions - documents
        for lengths in batches:
            count = len(lengths) + left_out
            left_out = 0
            found.append(
                self._divided(
                    bundles.Lengths(
                        trained=tuple(lengths),
                        completions=count,
                        max_completion_length=self.settings.max_completion_length,
                    )
                )
            )
        return found

    def _divided(self, lengths: bundles.Lengths) -> Divided:
        try:
            found = Divided(
                tuple(float(weight) for weight in self.loss.aggregation.weights(lengths)),
                float(self.loss.aggregation.divisor(lengths)),
            )
        except Exception as error:
            raise PluginError(f"{self.part.label}: its aggregation failed: {fault(error)}") from error
        # A weight of 0 says that a token is not trained, and NaN fails both comparisons.
        fits = len(found.weights) == len(lengths.trained) and all(0 < w < math.inf for w in found.weights)
        if not (fits and 0 <= found.divisor < math.inf):
            raise PluginError(
                f"{self.part.label}: its aggregation gave the weights {list(found.weights)} and the divisor "
                f"{found.divisor} for {len(lengths.trained)} documents with {list(lengths.trained)} trained tokens; it "
                f"must give a weight above 0 for each, and a divisor of at least 0."
            )
        return found

    def kl_penalty(self, behaviour: Sequence[float], reference: Sequence[float], trained: Sequence[bool]) -> float:
        """What a completion's reward loses before the advantages: beta · Σ (log μ - log reference).

        0 unless the loss has the divergence in the reward. With `old_logprobs` give these for `behaviour`.
        """
        if self.loss.kl != "reward" or self.settings.beta == 0:
            return 0.0
        pairs = zip(behaviour, reference, trained, strict=True)
        return self.settings.beta * sum(of_model - of_reference for of_model, of_reference, kept in pairs if kept)


class _Traced:
    """The functions of an objective. They are traced: plain torch ops only."""

    def __init__(self, policy: Policy):
        self.policy, self.settings = policy, policy.settings

    def negative_logprobs(self, logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """-log π at the sampling temperature; 0 where the label is -100."""
        from surogate_core.plugin import ops

        if self.settings.temperature == 1:
            return ops.cross_entropy(logits_NV, labels_N)
        return ops.cross_entropy(ops.wide(logits_NV) / self.settings.temperature, labels_N)

    def of_tokens(self, logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """The loss of each token, for objectives that need no sums over completions."""
        logp_N = -self.negative_logprobs(logits_NV, labels_N, columns)
        loss_N = self._loss(logp_N, columns, None)
        return loss_N.masked_fill(labels_N == IGNORE_LABEL, 0.0)

    def of_sequences(self, losses_N: Tensor, positions_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of the losses of a micro-batch; `losses_N` are `negative_logprobs`."""
        return (self._loss(-losses_N, columns, CompletionSums.of(positions_N, columns)) * columns[WEIGHTS]).sum()

    def _loss(self, logp_N: Tensor, columns: Mapping[str, Tensor], documents: CompletionSums | None) -> Tensor:
        loss_N = self.policy_loss(logp_N, columns, documents)
        if self.policy.weighted:
            weights_N = importance_weights(self.settings, logp_N, columns, documents)
            loss_N = loss_N * weights_N.clamp(max=self.settings.importance_clip)
        if self.settings.beta > 0 and self.policy.loss.kl == "loss":
            loss_N = loss_N + self.settings.beta * divergence(self.settings, logp_N, columns)
        return loss_N

    def policy_loss(self, logp_N: Tensor, columns: Mapping[str, Tensor], documents: CompletionSums | None) -> Tensor:
        """[N]: what `PolicyLoss.loss` returns. Raises `PluginError` where it fails or is no loss for each token."""
        part = self.policy.part
        try:
            loss_N = self.policy.loss.loss(terms(part, self.settings, logp_N, columns, documents))
        except PluginError:
            raise
        except Exception as error:
            raise PluginError(f"{part.label} failed: {fault(error)}") from error
        if getattr(loss_N, "shape", None) != logp_N.shape or loss_N.dtype != logp_N.dtype:
            found = f"{loss_N.dtype} of {list(loss_N.shape)}" if hasattr(loss_N, "shape") else repr(loss_N)[:80]
            raise PluginError(
                f"{part.label} returned {found}, and must return a loss for each token, {logp_N.dtype} of "
                f"{list(logp_N.shape)}."
            )
        return loss_N
