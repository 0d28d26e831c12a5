"""What losses and figures are made of: ratios, importance weights and divergences of tokens and completions.

All are traced: plain torch ops only. Shape suffix: N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from surogate_core.batch import WEIGHTS
from surogate_task_grpo.options import GRPOOptions, LossType

if TYPE_CHECKING:
    from torch import Tensor

ADVANTAGES, BEHAVIOUR, OLD, REFERENCE = "advantages", "behaviour_logprobs", "old_logprobs", "reference_logprobs"

LOG_RATIO = 20.0
"""Log ratios are cut to ± this before they are exponentiated, as in verl."""
PUBLISHED: Mapping[LossType, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "bnpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (0.0, 5.0),
    "rloo": (0.2, 0.2),
    "dppo": (0.2, 0.2),
}
"""Loss type → (low, high) where the options say nothing. For cispo the high one is the largest ratio, for dppo both are
differences of probabilities. From arXiv:2402.03300 (grpo), 2503.20783 (dr_grpo), 2503.14476 (dapo), 2507.18071 (gspo),
2506.13585 (cispo; its largest ratio as in TRL), 2402.14740 (rloo) and prime-rl (dppo); bnpo is TRL's.
"""


def bounds(options: GRPOOptions) -> tuple[float, float]:
    """(low, high) of the loss type: the options, or what its paper has."""
    low, high = PUBLISHED[options.loss_type]
    if options.epsilon is not None:
        low, high = options.epsilon, high if options.loss_type == "cispo" else options.epsilon
    return low, high if options.epsilon_high is None else options.epsilon_high


class Documents(NamedTuple):
    """Sums over the trained tokens of each completion."""

    total: Callable[[Tensor], Tensor]
    """[N] → [N]."""
    count_N: Tensor
    """Trained tokens of the token's completion, at least 1."""
    trained_N: Tensor
    """1 where a token is trained, otherwise 0."""

    @classmethod
    def of(cls, positions_N: Tensor, columns: Mapping[str, Tensor]) -> Documents:
        """Those of a micro-batch."""
        from surogate_core.kernels.documents import document_sums

        trained_N = (columns[WEIGHTS] != 0).to(columns[WEIGHTS].dtype)
        count_N = document_sums(trained_N, positions_N).clamp(min=1.0)
        return cls(lambda x_N: document_sums(x_N * trained_N, positions_N), count_N, trained_N)


def ratios(
    options: GRPOOptions, logp_N: Tensor, columns: Mapping[str, Tensor], documents: Documents | None = None
) -> Tensor:
    """[N]: ρ = π / old of each token; of gspo and rloo with `documents` that of its completion."""
    log_ratio_N = logp_N - old(logp_N, columns)
    if documents is not None and options.loss_type in ("gspo", "rloo"):
        # The ratio of the completion, with each token's own gradient, which its importance weight multiplies:
        # GSPO-token of arXiv:2507.18071.
        whole_N = documents.total(log_ratio_N.detach())
        whole_N = whole_N / documents.count_N if options.loss_type == "gspo" else whole_N
        log_ratio_N = whole_N + (logp_N - logp_N.detach())
    return exp(log_ratio_N)


def clipped(
    options: GRPOOptions, logp_N: Tensor, columns: Mapping[str, Tensor], documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """[N] bool: where a ratio that fell too far, and one that rose too far, has no gradient; cispo's are cut there."""
    advantages_N, (low, high) = columns[ADVANTAGES], bounds(options)
    if options.loss_type == "dppo":
        change_N = logp_N.detach().exp() - behaviour(logp_N, columns).exp()
        low, high = -low, high
    else:
        change_N = ratios(options, logp_N.detach(), columns, documents)
        low, high = (0.0, high) if options.loss_type == "cispo" else (1 - low, 1 + high)
    return (advantages_N < 0) & (change_N < low), (advantages_N > 0) & (change_N > high)


def importance_weights(
    options: GRPOOptions, logp_N: Tensor, columns: Mapping[str, Tensor], documents: Documents | None = None
) -> Tensor:
    """[N]: old / μ of each token, or of the product over its completion, before it is cut; constant."""
    difference_N = gap(logp_N, columns)
    if documents is not None and options.importance_correction == "sequence":
        difference_N = documents.total(difference_N)
    return exp(difference_N)


def gap(logp_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """[N]: log old - log μ, constant."""
    return (old(logp_N, columns) - behaviour(logp_N, columns)).detach()


def divergence(options: GRPOOptions, logp_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """The estimate of KL(π, reference) at each token; on tokens sampled from π its gradient is unbiased.

    With d = log π - log reference: k1 is d, k2 is d² / 2, and k3 is ρ · (exp(-d) - 1 + d). k3 without ρ = π / old has
    the gradient of another divergence (arXiv:2512.02556, TRL's `use_bias_correction_kl`). The gradient of k1 is 0 on
    average, so k1 has that of k2.
    """
    difference_N = logp_N - columns[REFERENCE]
    if options.kl_estimator == "k3":
        return exp(logp_N - old(logp_N, columns)) * (exp(-difference_N) - 1 + difference_N)
    half_N = difference_N.square() / 2
    if options.kl_estimator == "k2":
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
