"""Environments: where the prompts of reinforcement learning come from, and what their answers are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from surogate_core.bundles.options import NoOptions

Rewards = Mapping[str, float | None]
"""Name → reward of an episode. None is not applicable; the names are the same in every episode."""

FaultReason = Literal["exception", "exit", "invalid", "memory", "size", "timeout"]
"""Why an episode has no result: its code raised, ended its process, returned something that is not allowed, needed too
much memory, wrote too much, or took too long.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentProblem:
    """One problem: the messages that a model answers, and what an episode needs to judge the answer."""

    messages: tuple[Mapping[str, Any], ...]
    """The conversation so far, as a chat template takes it: mappings with ``role`` and ``content``."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that `Environment.start` reads, such as the right answer. The model does not see them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools for the chat template, as JSON schemas; empty if the messages describe them or there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an environment answers to a reply of the model."""

    messages: tuple[Mapping[str, Any], ...] = ()
    """Messages that follow the reply, such as the result of a tool. Empty if the episode is done."""
    done: bool
    """Whether the model's last reply was its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why an environment has no answer. A run counts it and goes on without the episode."""

    reason: FaultReason
    detail: str = ""
    """One line, such as ``ValueError: no number``."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class Episode(Protocol):
    """One attempt at a problem."""

    def reply(self, text: str) -> Turn:
        """Take the model's next reply. It is called once in an environment of one turn."""

    def rewards(self) -> Rewards:
        """What the attempt is worth. It may be called before the episode is done: the model had no room left."""


class Environment(Protocol):
    """A stream of problems and their episodes, without access to the model.

    Two more members are optional. ``group_rewards(episodes: Sequence[Episode]) -> list[Rewards]`` compares the
    attempts at one problem with each other; its rewards are added to those of each episode. ``held_out: int`` is the
    number of problems after the first `size` that training never draws, for evaluation.
    """

    @property
    def size(self) -> int | None:
        """Number of problems to train on, or None if there is no end of them."""

    def problem(self, number: int, seed: int) -> EnvironmentProblem:
        """The problem of a number. The same number and seed give the same problem, in every process."""

    def start(self, problem: EnvironmentProblem) -> Episode:
        """A new attempt at a problem. All that it knows of the problem is in the problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """An environment for reinforcement learning."""

    name: str
    """The value of `environment`."""
    build: Callable[[Any], Environment]
    """(options) → the environment. Called in a process of its own. Raises `UserError` for options that cannot work."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Name of a reward → its weight in the sum, 1 if it is not named. A reward of weight 0 is only reported."""
    deterministic: bool = True
    """Whether equal replies to an equal problem always get equal answers and rewards; `surogate env check` tries it."""


def total_reward(rewards: Rewards, weights: Mapping[str, float]) -> float | None:
    """The weighted sum of an episode's rewards, in the order of their names; None if none of them applies."""
    parts = [weights.get(name, 1.0) * value for name, value in sorted(rewards.items()) if value is not None]
    return sum(parts) if parts else None
