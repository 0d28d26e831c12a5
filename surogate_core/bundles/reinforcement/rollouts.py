"""Rollout engines: what continues prompts with the weights of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from surogate_core.bundles.options import NoOptions

if TYPE_CHECKING:
    from surogate_core.bundles.handed import ModelWeights

Reason = Literal["stop", "length"]
"""Why a completion ended: at a stop token or by the caller, or at the largest number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The filters apply in this order: penalty, temperature, top-k, top-p, min-p."""

    temperature: float = 1.0
    """0 takes the most probable token."""
    top_k: int = 0
    """Only the most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Only the most probable tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """Only tokens with at least this share of the largest probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that are in the prompt or the completion, and multiplies negative ones."""
    seed: int = 0
    """With the numbers of prompt, sample and position it decides every random choice."""
    tempered_logprobs: bool = False
    """Whether the log-probabilities are those of the logits over the temperature, before the filters; otherwise, and at
    temperature 0, those of the model itself. A loss that compares them with its own has the logits over the temperature
    too."""

    def __post_init__(self) -> None:
        checks = {
            "temperature": self.temperature >= 0,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": self.repetition_penalty > 0,
        }
        if wrong := [name for name, holds in checks.items() if not holds]:
            raise ValueError(f"{wrong[0]} is {getattr(self, wrong[0])}")


class Constraint(Protocol):
    """The tokens that one completion may still get. Only the engine's thread calls it."""

    def mask(self) -> bytes:
        """A bit for each token of the vocabulary, in bytes of eight whose lowest bit is first: whether it may be next.
        Bits beyond the vocabulary do not count. At least one bit is set.
        """

    def take(self, token: int) -> None:
        """The token that was chosen."""


class Grammar(Protocol):
    """The texts that a completion may be."""

    failure: str | None
    """Why a completion could not be held to it, such as a limit of time or memory."""

    def begin(self) -> Constraint:
        """The constraint of a completion that has no token yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to make."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_new_tokens: int
    number: int = 0
    """The prompt's number, part of the key of its random choices."""
    sample: int = 0
    """The number among the completions of this prompt, part of the key too."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the completion; the one that does is part of it."""
    grammar: Grammar | None = None
    """What the completion may be. Its constraint allows the stop tokens where the text is whole, so it needs one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens that were chosen for a request."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probability of each token under the model, before temperature and filters; see
    `Sampling.tempered_logprobs`."""
    reason: Reason


OnToken = Callable[[int, int], bool]
"""(number of the request in its call, token) → whether its completion ends here. Called for each token."""
Arriving = Callable[[], Sequence[Request]]
"""The requests that have arrived since the last call; it does not wait. Called between steps."""
OnChosen = Callable[[int, int, float], bool]
"""Like `OnToken`, with the token's log-probability as third argument."""


class RolloutEngine(Protocol):
    """Continues prompts."""

    def generate(self, requests: Sequence[Request], *, on_token: OnToken | None = None) -> list[Completion]:
        """A completion of each request. Which requests are in one call does not change what is sampled."""

    def serve(self, arriving: Arriving, on_token: OnChosen) -> None:
        """Completes requests that arrive while others run, until none runs and none arrives.

        They are numbered from 0 in the order in which they arrive. Each has the tokens that `generate` gives it. A
        completion ends when `on_token` is true, at a stop token, or at its largest number of tokens.
        """

    def forget(self) -> None:
        """Weights that are `RolloutSettings.frozen` have changed after all, so nothing is kept of earlier prompts."""

    def logprobs(self, documents: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probability of every token of each document but its first."""


class ApartEngine(RolloutEngine, Protocol):
    """An engine of a `RolloutEngineSpec.apart`: it has weights of its own, so it may generate while the run trains."""

    def copy_weights(self, documents: Sequence[Sequence[int]]) -> None:
        """Take the weights as they are now, for all completions until the next call of `forget`.

        `documents`: sequences of token ids to compare the copy with the original by. Called when nothing is generated
        or trained.
        """

    def close(self) -> None:
        """Give back what it holds elsewhere; the run is over, or failed. Raises nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """The sizes of an engine's caches."""

    slots: int
    """Sequences at a time."""
    context: int
    """Tokens of the longest sequence, its prompt included."""
    frozen: bool = False
    """Whether the weights stay as they are, so that keys and values of prompts may be kept between calls."""
    spares: bool = False
    """Whether the engine may take free memory of the device beyond its caches, to be faster."""
    options: Any = None
    """An instance of `RolloutEngineSpec.options`; None means the defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngineSpec:
    """A way to continue prompts with the weights of a run."""

    name: str
    """The value of `rollout`; ``native`` is the core's."""
    open: Callable[[ModelWeights, RolloutSettings], RolloutEngine]
    """Makes an engine of weights that are in use: it reads them where they are, so a later call sees later weights."""
    caches: bool = True
    """Whether it keeps keys and values on the run's device, so that memory must be left for them."""
    apart: bool = False
    """Whether `open` makes an `ApartEngine`."""
    copied: Callable[[ModelWeights], tuple[int, ModelWeights]] | None = None
    """From weights without values: the bytes of the copy that it holds on the next GPU, and the copy without values.
    `surogate plan` names what that GPU needs.
    """
    constrains: bool = False
    """Whether it holds completions to `Request.grammar`; otherwise it receives no request with one."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
