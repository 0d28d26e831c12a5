"""What policy losses and figures are made of: ratios, importance weights and divergences of tokens and completions.

All are traced: plain torch ops only. Shape suffix: N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from surogate_core.plugin import WEIGHTS, PluginError, bundles

if TYPE_CHECKING:
    from torch import Tensor

ADVANTAGES, BEHAVIOUR, OLD, REFERENCE = "advantages", "behaviour_logprobs", "old_logprobs", "reference_logprobs"

LOG_RATIO = 20.0
"""Log ratios are cut to ± this before they are exponentiated, as in verl."""


class PolicySettings(Protocol):
    """The settings of a run that a policy loss is computed with, as the options of a task name them."""

    @property
    def temperature(self) -> float:
        """Divides the logits."""

    @property
    def num_iterations(self) -> int:
        """Optimizer steps on the same completions."""

    @property
    def max_completion_length(self) -> int:
        """Most tokens of a completion."""

    @property
    def beta(self) -> float:
        """Coefficient of the divergence from the reference."""

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """Estimator of that divergence."""

    @property
    def epsilon(self) -> float | None:
        """The lower bound; None takes that of the loss."""

    @property
    def epsilon_high(self) -> float | None:
        """The upper bound; None takes `epsilon` or that of the loss."""

    @property
    def importance_correction(self) -> Literal["token", "sequence", "none"]:
        """What the importance weights are computed for."""

    @property
    def importance_clip(self) -> float:
        """Largest importance weight."""


class CompletionSums(NamedTuple):
    """Sums over the trained tokens of each completion."""

    total: Callable[[Tensor], Tensor]
    """[N] → [N]."""
    count_N: Tensor
    """Trained tokens of the token's completion, at least 1."""
    trained_N: Tensor
    """1 where a token is trained, otherwise 0."""

    @classmethod
    def of(cls, positions_N: Tensor, columns: Mapping[str, Tensor]) -> CompletionSums:
        """Those of a micro-batch."""
        from surogate_core.plugin import compute

        trained_N = (columns[WEIGHTS] != 0).to(columns[WEIGHTS].dtype)
        count_N = compute.document_sums(trained_N, positions_N).clamp(min=1.0)
        return cls(lambda x_N: compute.document_sums(x_N * trained_N, positions_N), count_N, trained_N)


def bounds(loss: bundles.PolicyLoss, settings: PolicySettings) -> tuple[float, float]:
    """(low, high): the settings, or what the loss has; low is 0 for a loss without a lower bound."""
    low, high = loss.bounds
    if settings.epsilon is not None and low is not None:
        low = high = settings.epsilon
    return 0.0 if low is None else low, high if settings.epsilon_high is None else settings.epsilon_high


def terms(
    part: bundles.Part,
    settings: PolicySettings,
    logp_N: Tensor,
    columns: Mapping[str, Tensor],
    documents: CompletionSums | None,
) -> bundles.PolicyTerms:
    """The terms of a micro-batch, or of a chunk of it without `documents`: its ratios are then those of tokens."""
    loss: bundles.PolicyLoss = part.built
    old_N, behaviour_N = old(logp_N, columns), behaviour(logp_N, columns)
    log_ratio_N = logp_N - (old_N if loss.against == "old" else behaviour_N)
    if documents is not None and loss.ratio != "token":
        # The ratio of the completion, with each token's own gradient, which its importance weight multiplies:
        # GSPO-token of arXiv:2507.18071.
        whole_N = documents.total(log_ratio_N.detach())
        whole_N = whole_N / documents.count_N if loss.ratio == "mean" else whole_N
        log_ratio_N = whole_N + (logp_N - logp_N.detach())
    low, high = bounds(loss, settings)
    return bundles.PolicyTerms(
        logp_N=logp_N,
        old_N=old_N,
        behaviour_N=behaviour_N,
        advantages_N=columns[ADVANTAGES],
        log_ratio_N=log_ratio_N,
        ratio_N=exp(log_ratio_N),
        low=low,
        high=high,
        total=documents.total if loss.sums_completions and documents is not None else _refusal(part),
    )


def _refusal(part: bundles.Part) -> Callable[[Tensor], Tensor]:
    def total(x_N: Tensor) -> Tensor:
        raise PluginError(
            f"{part.label} calls `total`, and only a loss with `sums_completions=True` sees whole completions."
        )

    return total


def importance_weights(
    settings: PolicySettings, logp_N: Tensor, columns: Mapping[str, Tensor], documents: CompletionSums | None = None
) -> Tensor:
    """[N]: old / μ of each token, or of the product over its completion, before it is cut; constant."""
    difference_N = gap(logp_N, columns)
    if documents is not None and settings.importance_correction == "sequence":
        difference_N = documents.total(difference_N)
    return exp(difference_N)


def gap(logp_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """[N]: log old - log μ, constant."""
    return (old(logp_N, columns) - behaviour(logp_N, columns)).detach()


def divergence(settings: PolicySettings, logp_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """The estimate of KL(π, reference) at each token; on tokens sampled from π its gradient is unbiased.

    With d = log π - log reference: k1 is d, k2 is d² / 2, and k3 is ρ · (exp(-d) - 1 + d). k3 without ρ = π / old has
    the gradient of another divergence (arXiv:2512.02556, TRL's `use_bias_correction_kl`). The gradient of k1 is 0 on
    average, so k1 has that of k2.
    """
    difference_N = logp_N - columns[REFERENCE]
    if settings.kl_estimator == "k3":
        return exp(logp_N - old(logp_N, columns)) * (exp(-difference_N) - 1 + difference_N)
    half_N = difference_N.square() / 2
    if settings.kl_estimator == "k2":
        return half_N
    return difference_N.detach() + (half_N - half_N.detach())


def old(logp_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """[N]: the log-probability before the first step on these completions, constant."""
    found = columns.get(OLD)
    return logp_N.detach() if found is None else found


def behaviour(logp_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """[N]: log μ; where it is not finite, the log-probability before the step."""
    behaviour_N = columns[BEHAVIOUR]
    return behaviour_N.where(behaviour_N.isfinite(), old(logp_N, columns))


def exp(x_N: Tensor) -> Tensor:
    """[N]: e to the power of a log ratio, which is cut to ± `LOG_RATIO`."""
    return x_N.clamp(-LOG_RATIO, LOG_RATIO).exp()
