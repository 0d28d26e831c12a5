"""The groups of a step: completions of prompts, their advantages, and the groups that replace those without signal.

Shape suffixes: P prompts, G completions of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surogate_core.plugin import UserError, advantages, bundles, events
from surogate_task_grpo import no_signal
from surogate_task_grpo.options import GRPOOptions, truncation
from surogate_task_grpo.play import Played

Prompts = Sequence[tuple[int, Any]]
"""(number of the prompt in the run, its problem in the environment)."""
SHOWN = 3
"""Completions of a step with the highest reward, and as many with the lowest, that are shown."""
PENALTY = "length_penalty"
"""Name of the reward that `truncated_completions=penalty` adds."""
DIVERGENCE = "kl_penalty"
"""Name of the reward that the loss type rloo adds if beta is not 0."""


@dataclass(slots=True, kw_only=True)
class CompletionGroup:
    """The completions of one prompt."""

    number: int
    """The number of the prompt in the run."""
    played: list[Played]
    has_signal: bool
    """Whether two completions have different rewards, and one that does is trained on."""
    advantages: list[float] = field(default_factory=list)
    kept: bool = False
    """Whether the step trains on it."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """All groups of one step."""

    groups: list[CompletionGroup]
    refills: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase → its wall time."""
    overlapped: dict[str, float] = field(default_factory=dict)
    """The same of a generation that was made while the model was trained."""

    @property
    def kept(self) -> list[CompletionGroup]:
        """The groups that the step trains on."""
        return [group for group in self.groups if group.kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Plays prompts until a step has as many groups with signal as it wants."""

    options: GRPOOptions
    advantage: bundles.Part
    """The built `AdvantageSpec`."""
    draw: Callable[[int], Prompts]
    """The next prompts of the run."""
    play: Callable[[Prompts], list[Played]]
    """Their episodes, `num_generations` of each."""
    penalties: Callable[[Sequence[Played]], Sequence[float]] = lambda played: [0.0] * len(played)
    """What the reward of each episode loses because the model differs from the reference."""

    def collect(self) -> Generation:
        """The groups of a step; at least one of them has signal. Raises `UserError` if prompts bring none."""
        groups: list[CompletionGroup] = []
        refills = 0
        for attempt in range(self.options.max_attempts_without_signal):
            for refill in range(self.options.max_refills + 1):
                missing = self.options.prompts_per_step - sum(group.has_signal for group in groups)
                if not missing:
                    break
                groups += self._groups(missing)
                refills += bool(attempt or refill)
                if len(groups) > 1 and all(one.reason == no_signal.TIMEOUT for group in groups for one in group.played):
                    raise UserError(
                        no_signal.message(self.options, [group.played for group in groups])
                    )  # more of them would take as long
            if any(group.has_signal for group in groups):
                return self._judged(groups, refills)
        raise UserError(no_signal.message(self.options, [group.played for group in groups]))

    def _groups(self, count: int) -> list[CompletionGroup]:
        problems, size = self.draw(count), self.options.num_generations
        played = self.play(problems)
        for one, divergence in zip(played, self.penalties(played), strict=True):
            self._penalise(one, divergence)
        some = (played[i * size : (i + 1) * size] for i in range(count))
        return [
            CompletionGroup(number=number, played=group, has_signal=no_signal.cause(self.options, group) is None)
            for (number, _), group in zip(problems, some, strict=True)
        ]

    def _penalise(self, one: Played, divergence: float) -> None:
        """Lower the reward by the divergence, and near the largest length (DAPO, arXiv:2503.14476)."""
        if one.reward is None:
            return
        if divergence:
            one.rewards, one.reward = {**one.rewards, DIVERGENCE: -divergence}, one.reward - divergence
        if truncation(self.options) == "penalty":
            lost = self._length_penalty(one)
            one.rewards, one.reward = {**one.rewards, PENALTY: lost}, one.reward + lost

    def _length_penalty(self, one: Played) -> float:
        """0 down to -1, linear over the last tokens before the largest length."""
        longest = self.options.max_completion_length
        buffer = min(self.options.overlong_buffer or -(-longest // 5), longest)
        return -1.0 if one.truncated else -min(max(one.length - (longest - buffer), 0) / buffer, 1.0)

    def _judged(self, groups: list[CompletionGroup], refills: int) -> Generation:
        rewards_PG = np.array([[_number(one.reward) for one in group.played] for group in groups], np.float64)
        lengths_PG = np.array([[one.length for one in group.played] for group in groups], np.int64)
        for group, found in zip(groups, advantages(self.advantage, rewards_PG, lengths_PG).tolist(), strict=True):
            group.advantages, group.kept = found, group.has_signal
        return Generation(groups=groups, refills=refills)


def _number(reward: float | None) -> float:
    return float("nan") if reward is None else reward


def unused_weights(options: GRPOOptions, generation: Generation) -> str | None:
    """A sentence about the names in `reward_weights` that no completion has; None if there are none, or no rewards."""
    found = {name for group in generation.groups for one in group.played for name in one.rewards}
    unused = sorted(options.reward_weights.keys() - found)
    if not found or not unused:
        return None
    return (
        f"reward_weights: no completion of the first step has a reward {' or '.join(unused)}; there are "
        f"{', '.join(sorted(found))}."
    )


# ------------------------------------------------------------------------------- events


def rollouts_event(generation: Generation, step: int) -> events.Rollouts:
    """The figures of a step's completions."""
    played = [one for group in generation.groups for one in group.played]
    return events.Rollouts(
        step=step,
        prompts=len(generation.groups),
        completions=len(played),
        **reward_figures(played),
        without_signal=_share([not group.has_signal for group in generation.groups]),
        refills=generation.refills,
        kept=_share([group.kept for group in generation.groups for _ in group.played]),
        terminated_length=_spread([one.length for one in played if one.reason == "stop"]),
        turns=sum(len(one.replies) for one in played) / len(played),
        prefix_breaks=sum(max(len(one.samples) - 1, 0) for one in played),
        seconds=dict(generation.seconds),
        overlapped=dict(generation.overlapped),
    )


def reward_figures(played: Sequence[Played]) -> dict[str, Any]:
    """The figures that rollouts and held-out completions have in common."""
    names = dict.fromkeys(name for one in played for name in one.rewards)
    by_name = {name: _spread([one.rewards.get(name) for one in played]) for name in sorted(names)}
    lengths: NDArray[np.int64] = np.array([one.length for one in played])
    return {
        "reward": _spread([one.reward for one in played]),
        "rewards": {name: spread for name, spread in by_name.items() if spread is not None},
        "faults": dict(sorted(Counter(one.reason for one in played if one.fault).items())),
        "length": _spread(lengths.tolist()),
        "truncated": _share([one.truncated for one in played]),
        "tokens": int(lengths.sum()),
    }


def samples_event(generation: Generation, step: int) -> events.RolloutSamples:
    """The completions with the highest and the lowest rewards, and the first that failed."""
    pairs = [(group, place) for group in generation.groups for place in range(len(group.played))]
    rewarded = [(g, i) for g, i in pairs if g.played[i].reward is not None]
    ranked = sorted(rewarded, key=lambda pair: -(pair[0].played[pair[1]].reward or 0.0))
    chosen = ranked if len(ranked) <= 2 * SHOWN else [*ranked[:SHOWN], *ranked[-SHOWN:]]
    chosen += [(g, i) for g, i in pairs if g.played[i].fault][:1]
    return events.RolloutSamples(step=step, samples=tuple(_shown(group, place) for group, place in chosen))


def _shown(group: CompletionGroup, place: int) -> events.RolloutSample:
    one = group.played[place]
    last = one.problem.messages[-1] if one.problem is not None else {}
    return events.RolloutSample(
        prompt=str(last.get("content") or ""),
        completion=conversation_text(one),
        reward=one.reward,
        rewards=one.rewards,
        advantage=group.advantages[place] if group.kept else None,
        reason=one.reason,
        length=one.length,
    )


def conversation_text(one: Played) -> str:
    """The replies of an episode, with what the environment said between them."""
    parts: list[str] = []
    answers: list[list[Mapping[str, Any]]] = [*one.answers, *([[]] * len(one.replies))]
    for reply, answer in zip(one.replies, answers, strict=False):
        parts += [reply, *(f"[{message.get('role')}] {message.get('content')}" for message in answer)]
    return "\n".join(parts)


def _spread(values: Sequence[float | None]) -> events.Spread | None:
    present = np.array([value for value in values if value is not None], np.float64)
    if not present.size:
        return None
    return events.Spread(
        mean=float(present.mean()), std=float(present.std()), min=float(present.min()), max=float(present.max())
    )


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0
