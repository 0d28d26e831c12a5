"""The losses of reinforcement learning, as objectives over the columns of a micro-batch.

The columns, each 0 where the label is -100:

- ``advantages``: of the token's completion.
- ``behaviour_logprobs``: log-probability of the token when it was sampled, as the rollout engine computed it, at the
  sampling temperature. A value that is not finite counts as equal to the trainer's.
- ``old_logprobs``, with several iterations: the same before the first optimizer step on these completions, as the
  trainer computes it. With one iteration it is the model's own, held constant.
- ``reference_logprobs``, where beta > 0: the same of the reference model.
- ``weights``: the weight of the token in the sum over the step, from `aggregation`.

With π the model, `old` the old and μ the behaviour probabilities, A the advantage, ρ = π / old and
w = min(old / μ, importance_clip), the policy loss of a token is:

- grpo, dr_grpo, dapo, bnpo: -w · min(ρ A, clip(ρ, 1 - low, 1 + high) A)
- gspo: the same, where ρ is the geometric mean over the completion
- rloo: the same, where ρ is the product over the completion
- cispo: -w · sg(min(ρ, high)) · A · log π, where sg(x) is x without gradient
- dppo: -(π / μ) A + 0.001 · log²(π / μ), without the first term where A > 0 and π - μ > high, or A < 0 and
  π - μ < -low

Where beta > 0, all but rloo add beta · KL(π, reference); rloo has it in the rewards (`kl_penalty`). `aggregation` says
how tokens are averaged. The gradients are those of the published losses of completions; the value of rloo's is theirs
times the length.

Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surogate_core.batch import IGNORE_LABEL, WEIGHTS
from surogate_core.bundles import Objective
from surogate_task_grpo.figures import figures
from surogate_task_grpo.options import GRPOOptions
from surogate_task_grpo.terms import (
    ADVANTAGES,
    BEHAVIOUR,
    OLD,
    REFERENCE,
    Documents,
    behaviour,
    bounds,
    clipped,
    divergence,
    exp,
    importance_weights,
    ratios,
)

if TYPE_CHECKING:
    from torch import Tensor

DPPO_PENALTY = 1e-3
"""Coefficient of the squared log ratio in dppo, as in prime-rl."""


def columns(options: GRPOOptions) -> tuple[str, ...]:
    """Names of the columns that the loss reads, besides ``weights``."""
    found = [ADVANTAGES, BEHAVIOUR]
    found += [OLD] if options.num_iterations > 1 else []
    return (*found, *([REFERENCE] if options.beta > 0 else []))


def by_sequence(options: GRPOOptions) -> bool:
    """Whether the loss needs sums over whole completions, for which the head runs twice.

    At the first iteration a ratio is 1 whether it is of a token or of a completion, so gspo and rloo need none.
    """
    if options.loss_type == "dppo":
        return False
    ratios = options.loss_type in ("gspo", "rloo") and options.num_iterations > 1
    return ratios or options.importance_correction == "sequence"


def objective(options: GRPOOptions) -> Objective:
    """The objective of a run."""
    loss, measured = _Loss(options), figures(options)
    whole = by_sequence(options)
    return Objective(
        name=options.loss_type,
        token_loss=loss.negative_logprobs if whole else loss.of_tokens,
        columns=columns(options),
        sequence_loss=loss.of_sequences if whole else None,
        figures=(*measured.of_tokens, *measured.of_sequences),
        token_figures=measured.tokens,
        sequence_figures=measured.sequences if measured.of_sequences else None,
        count=measured.of_sequences[0] if measured.of_sequences else None,
        largest=measured.largest,
    )


@dataclass(frozen=True, slots=True)
class Divided:
    """How a micro-batch counts in the loss of its step."""

    weights: tuple[float, ...]
    """The weight of every trained token of each of its documents."""
    divisor: float
    """`MicroBatch.divisor`."""


def aggregation(options: GRPOOptions, batches: Sequence[Sequence[int]], completions: int) -> list[Divided]:
    """The weights of tokens, and the divisors, of a step's micro-batches.

    `batches`: of each micro-batch the trained tokens of each document, at least 1. `completions`: documents of the
    step, those included that are left out because they are truncated; they count where a loss is averaged over
    completions.

    ======================= ============================== ================================================
    loss type               weight of a token              the step's divisor
    ======================= ============================== ================================================
    dapo, cispo, dppo       1                              trained tokens
    grpo, gspo              1 / tokens of its completion   completions
    rloo                    1                              completions
    dr_grpo                 1                              completions · max_completion_length
    bnpo                    1 / tokens of its micro-batch  micro-batches
    ======================= ============================== ================================================
    """
    documents = sum(map(len, batches))
    assert completions >= documents, f"{completions} completions, {documents} documents"
    found = []
    # Those that are left out are counted with the first micro-batch: only the sum over the step matters.
    left_out = completions - documents
    for lengths in batches:
        tokens, count = sum(lengths), len(lengths) + left_out
        left_out = 0
        match options.loss_type:
            case "dapo" | "cispo" | "dppo":
                one = Divided((1.0,) * len(lengths), float(tokens))
            case "grpo" | "gspo":
                one = Divided(tuple(1 / length for length in lengths), float(count))
            case "rloo":
                one = Divided((1.0,) * len(lengths), float(count))
            case "dr_grpo":
                one = Divided((1.0,) * len(lengths), float(count) * options.max_completion_length)
            case "bnpo":
                one = Divided(tuple(1 / tokens for _ in lengths), 1.0 if lengths else 0.0)
        found.append(one)
    return found


def kl_penalty(
    options: GRPOOptions, behaviour: Sequence[float], reference: Sequence[float], trained: Sequence[bool]
) -> float:
    """What a completion's reward loses before the advantages of rloo: beta · Σ (log μ - log reference).

    0 for the other loss types, which have the divergence in the loss. With `old_logprobs` give these for `behaviour`.
    """
    if options.loss_type != "rloo" or options.beta == 0:
        return 0.0
    pairs = zip(behaviour, reference, trained, strict=True)
    return options.beta * sum(of_model - of_reference for of_model, of_reference, kept in pairs if kept)


class _Loss:
    """The functions of an objective. They are traced: plain torch ops only."""

    def __init__(self, options: GRPOOptions):
        self.options = options
        self.low, self.high = bounds(options)

    def negative_logprobs(self, logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """-log π at the sampling temperature; 0 where the label is -100."""
        from surogate_core.kernels.ops import cross_entropy, wide

        if self.options.temperature == 1:
            return cross_entropy(logits_NV, labels_N)
        return cross_entropy(wide(logits_NV) / self.options.temperature, labels_N)

    def of_tokens(self, logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """The loss of each token, for objectives that need no sums over completions."""
        logp_N = -self.negative_logprobs(logits_NV, labels_N, columns)
        loss_N = self._loss(logp_N, columns, None)
        return loss_N.masked_fill(labels_N == IGNORE_LABEL, 0.0)

    def of_sequences(self, losses_N: Tensor, positions_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of the losses of a micro-batch; `losses_N` are `negative_logprobs`."""
        return (self._loss(-losses_N, columns, Documents.of(positions_N, columns)) * columns[WEIGHTS]).sum()

    def _loss(self, logp_N: Tensor, columns: Mapping[str, Tensor], documents: Documents | None) -> Tensor:
        loss_N = self._policy(logp_N, columns, documents)
        if self.options.loss_type != "dppo" and self.options.importance_correction != "none":
            weights_N = importance_weights(self.options, logp_N, columns, documents)
            loss_N = loss_N * weights_N.clamp(max=self.options.importance_clip)
        if self.options.beta > 0 and self.options.loss_type != "rloo":
            loss_N = loss_N + self.options.beta * divergence(self.options, logp_N, columns)
        return loss_N

    def _policy(self, logp_N: Tensor, columns: Mapping[str, Tensor], documents: Documents | None) -> Tensor:
        kind, advantages_N = self.options.loss_type, columns[ADVANTAGES]
        if kind == "dppo":
            return self._dppo(logp_N, columns)
        ratio_N = ratios(self.options, logp_N, columns, documents)
        if kind == "cispo":
            return -ratio_N.clamp(max=self.high).detach() * advantages_N * logp_N
        clipped_N = ratio_N.clamp(1 - self.low, 1 + self.high)
        return -(ratio_N * advantages_N).minimum(clipped_N * advantages_N)

    def _dppo(self, logp_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        log_ratio_N = logp_N - behaviour(logp_N, columns)
        fallen_N, risen_N = clipped(self.options, logp_N, columns)
        policy_N = (-exp(log_ratio_N) * columns[ADVANTAGES]).masked_fill(fallen_N | risen_N, 0.0)
        return policy_N + DPPO_PENALTY * log_ratio_N.square()
