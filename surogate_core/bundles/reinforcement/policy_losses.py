"""Policy losses: what reinforcement learning minimises, in parts.

Shape suffix: N tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from surogate_core.bundles.options import NoOptions, options_from_flat

if TYPE_CHECKING:
    from torch import Tensor

    from surogate_core.bundles.handed import RunKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """The sampled tokens of a micro-batch, as a policy loss sees them. Each tensor is [N], fp32."""

    logp_N: Tensor
    """log π: the model that is trained, at the sampling temperature. It has a gradient, as the two ratios have."""
    old_N: Tensor
    """log-probability before the first step on these completions. With one iteration it equals `logp_N`."""
    behaviour_N: Tensor
    """log μ: as the rollout engine computed it; `old_N` where the engine gave no finite value."""
    advantages_N: Tensor
    """The advantage of the token's completion."""
    log_ratio_N: Tensor
    """The logarithm of `ratio_N`."""
    ratio_N: Tensor
    """The probability ratio that `PolicyLoss.ratio` and `PolicyLoss.against` describe, at most e^20 and at least e^-20.
    The ratio of a completion has the gradient of each token's own log-probability."""
    low: float
    """The lower bound: `epsilon`, or from `PolicyLoss.bounds`."""
    high: float
    """The upper bound: `epsilon_high`, or from `PolicyLoss.bounds`."""
    total: Callable[[Tensor], Tensor]
    """[N] → [N]: for each token the sum over the trained tokens of its completion. A loss that calls it sets
    `PolicyLoss.sums_completions`."""

    def clipped(self, low: float, high: float) -> tuple[Tensor, Tensor]:
        """[N] bool: where a ratio below `low` has a negative advantage, and where one above `high` a positive one."""
        ratio_N = self.ratio_N.detach()
        return (self.advantages_N < 0) & (ratio_N < low), (self.advantages_N > 0) & (ratio_N > high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The completions of a micro-batch, as an aggregation sees them."""

    trained: tuple[int, ...]
    """Trained tokens of each document, at least 1; empty for a micro-batch of padding."""
    completions: int
    """Documents that count in a mean over completions. The first micro-batch of a step also counts those that the step
    leaves out because they are truncated."""
    max_completion_length: int
    """The key of this name."""

    @property
    def tokens(self) -> int:
        """Trained tokens of the micro-batch."""
        return sum(self.trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """How the losses of tokens become the loss of a step: Σ weight · loss / Σ divisor, over its micro-batches."""

    weights: Callable[[Lengths], Sequence[float]] = field(repr=False)
    """The weight of every trained token of each document, above 0."""
    divisor: Callable[[Lengths], float] = field(repr=False)
    """What the micro-batch adds to the divisor, at least 0."""
    name: str = ""
    """How it is shown."""


def _ones(lengths: Lengths) -> tuple[float, ...]:
    return (1.0,) * len(lengths.trained)


PER_TOKEN = Aggregation(name="per token", weights=_ones, divisor=lambda lengths: float(lengths.tokens))
"""The mean over the trained tokens of a step."""
PER_COMPLETION = Aggregation(
    name="per completion",
    weights=lambda lengths: tuple(1 / length for length in lengths.trained),
    divisor=lambda lengths: float(lengths.completions),
)
"""The mean over completions of the mean over their tokens."""
SUM_PER_COMPLETION = Aggregation(
    name="sum per completion", weights=_ones, divisor=lambda lengths: float(lengths.completions)
)
"""The mean over completions of the sum over their tokens."""
PER_LARGEST_LENGTH = Aggregation(
    name="per largest length",
    weights=_ones,
    divisor=lambda lengths: float(lengths.completions) * lengths.max_completion_length,
)
"""The sum over tokens, divided by the number of completions times the largest length."""
PER_MICRO_BATCH = Aggregation(
    name="per micro-batch",
    weights=lambda lengths: tuple(1 / lengths.tokens for _ in lengths.trained),
    divisor=lambda lengths: 1.0 if lengths.trained else 0.0,
)
"""The mean over micro-batches of the mean over their tokens. It depends on how completions are packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The policy loss that a `PolicyLossSpec` builds.

    A token's loss is `loss`, times the importance weight old / μ if `corrected`, plus beta times the divergence from
    the reference if `kl` is ``loss``.
    """

    loss: Callable[[PolicyTerms], Tensor]
    """The terms → [N]: the loss of each token. Traced: plain torch ops only, differentiable, finite for every ratio."""
    ratio: Literal["token", "mean", "product"] = "token"
    """The ratio of a token, or one of its completion: the geometric mean or the product over its tokens. A ratio of
    completions needs the log-probabilities of all tokens first, so the head runs twice where it is not 1."""
    against: Literal["old", "behaviour"] = "old"
    """What the ratio compares π with: the model before the first step on these completions, with which the ratio is 1
    in the first of `num_iterations`, or the rollout engine's μ."""
    bounds: tuple[float | None, float] = (0.2, 0.2)
    """(low, high) where `epsilon` and `epsilon_high` are null. The loss says what they bound. `epsilon` sets both.
    If low is None the loss has no lower bound: `epsilon` then has no effect, and only `epsilon_high` sets a bound."""
    clipped: Callable[[PolicyTerms], tuple[Tensor, Tensor]] | None = None
    """The terms → [N] bool each: where a ratio fell, and where one rose, so far that it has no gradient. The step
    reports the shares as ``clip_ratio/…``. None: the loss clips nothing."""
    corrected: bool = True
    """Whether `importance_correction` applies. A loss that weighs old / μ itself, or whose ratio is against μ, sets
    False."""
    sums_completions: bool = False
    """Whether the loss calls `PolicyTerms.total`. The head then always runs twice."""
    kl: Literal["loss", "reward"] | None = "loss"
    """Where `beta` · KL(π, reference) is: added to the loss of each token, or subtracted from the reward of the
    completion before the advantages. None: nowhere, and a run with `beta` is refused."""
    aggregation: Aggregation = PER_TOKEN
    """How the losses of tokens are averaged."""
    figures: Mapping[str, Callable[[PolicyTerms], Tensor]] = field(default_factory=dict)
    """Name → the terms → [N]: figures of its own, which the step reports as means over trained tokens; over completions
    where the head runs twice."""

    def __post_init__(self) -> None:
        if self.corrected and self.against == "behaviour":
            raise TypeError("a ratio against the behaviour has the importance weight in it: `corrected` must be False")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossSpec:
    """A policy loss."""

    name: str
    """The value of a task's key such as `loss_type`."""
    build: Callable[[Any], PolicyLoss]
    """Options → the loss. Called when the configuration is checked: import torch inside `PolicyLoss.loss`, not here,
    or the check of every configuration with this loss becomes slower."""
    options: type = NoOptions
    """Dataclass of its own options. Every field has a default and a flat key, `Annotated[T, Flat("key")]`."""
    advantage: str = "group"
    """Name of the `AdvantageSpec` that a run takes if it chooses none."""

    def options_of(self, config: RunKeys) -> Any:
        """The options, which flat keys of the configuration set."""
        return options_from_flat(self.options, config.flat)
