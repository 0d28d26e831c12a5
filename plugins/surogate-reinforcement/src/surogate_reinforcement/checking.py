"""Plays the same problems twice, in different processes and orders, and compares every byte."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from surogate_core.plugin import UserError, bundles
from surogate_reinforcement.order import held_out_numbers, training_numbers
from surogate_reinforcement.pool import EnvironmentPool

MOST_TURNS = 16
"""Replies of an episode at most."""
ANSWER = "answer"
"""Field of a problem's data that a reply of the check is taken from, if it is text."""
REPEAT = "draw every choice from the problem's number and seed, or deterministic=False in its EnvironmentSpec"
"""What to do where an environment says that it is deterministic and is not."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """An episode of the check."""

    number: int
    """The problem's number."""
    reply: str
    """The kind of replies: empty, fixed, or the problem's answer."""
    problem: bundles.EnvironmentProblem | bundles.Fault
    turns: list[bundles.Turn | bundles.Fault] = field(default_factory=list)
    rewards: bundles.Rewards | bundles.Fault | None = None

    @property
    def fault(self) -> bundles.Fault | None:
        """The first fault of the problem and its episode."""
        return next((one for one in (self.problem, *self.turns, self.rewards) if isinstance(one, bundles.Fault)), None)

    def record(self) -> dict[str, Any]:
        """All that the environment has said, as JSON values."""
        problem = str(self.problem) if isinstance(self.problem, bundles.Fault) else _plain(self.problem)
        turns = [
            str(t) if isinstance(t, bundles.Fault) else {"messages": list(t.messages), "done": t.done}
            for t in self.turns
        ]
        rewards = str(self.rewards) if isinstance(self.rewards, bundles.Fault) else self.rewards
        return {"problem": problem, "turns": turns, "rewards": rewards}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check found."""

    problems: int
    episodes: int
    differences: tuple[str, ...]
    """What was different the second time, one line each."""
    faults: dict[str, int]
    """Fault → how often."""
    names: tuple[tuple[str, ...], ...]
    """The sets of names that the rewards had; one if all is well."""
    rewards: dict[str, float | None]
    """Kind of reply → mean reward; None where no reward applies."""
    unknown_weights: tuple[str, ...]
    """Names that have a weight and are no reward."""


def _plain(problem: bundles.EnvironmentProblem) -> dict[str, Any]:
    return {"messages": list(problem.messages), "data": dict(problem.data), "tools": list(problem.tools)}


def check_repeats(
    name: str, one: bundles.EnvironmentProblem | bundles.Fault, other: bundles.EnvironmentProblem | bundles.Fault
) -> None:
    """Raise `UserError` if a deterministic environment has given two problems for one number. `name`: its own."""
    if isinstance(one, bundles.Fault) or isinstance(other, bundles.Fault):
        return
    first, second = _plain(one), _plain(other)
    for part in first:
        if _bytes(first[part]) != _bytes(second[part]):
            raise UserError(
                f"environment={name} says that it is deterministic, and one problem, asked for twice, had the {part} "
                f"{_bytes(first[part])[:120]} and {_bytes(second[part])[:120]}. Fix: {REPEAT}; `surogate env check` "
                f"shows more."
            )


def check(
    first: EnvironmentPool,
    second: EnvironmentPool,
    *,
    problems: int,
    seed: int,
    replies: Sequence[str] = (),
) -> Checked:
    """Play problems in two pools of the same environment, in the second one backwards.

    `replies`: texts that every episode of a further kind says, one after the other.
    """
    size = first.size
    numbers = training_numbers(0, problems if size is None else min(problems, size), size=size, seed=seed)
    numbers += held_out_numbers(min(3, problems), size=size, held_out=first.held_out)
    ahead = _played(first, numbers, seed, replies)
    back = {(a.number, a.reply): a for a in _played(second, numbers[::-1], seed, replies)}
    differences = []
    for attempt in ahead:
        one, other = attempt.record(), back[attempt.number, attempt.reply].record()
        if (part := next((part for part in one if _bytes(one[part]) != _bytes(other[part])), None)) is not None:
            shown = f"{_bytes(one[part])[:120]} and {_bytes(other[part])[:120]}"
            differences.append(f"problem {attempt.number}, {attempt.reply} reply: {part}: {shown}")
    sound = [a.rewards for a in ahead if isinstance(a.rewards, dict)]
    names = {tuple(sorted(rewards)) for rewards in sound}
    weights = first.spec.weights
    means: dict[str, float | None] = {}
    for kind in dict.fromkeys(a.reply for a in ahead):
        of_kind = [a.rewards for a in ahead if a.reply == kind and isinstance(a.rewards, dict)]
        found = [r for r in (bundles.total_reward(rewards, weights) for rewards in of_kind) if r is not None]
        means[kind] = sum(found) / len(found) if found else None
    return Checked(
        problems=len(numbers),
        episodes=len(ahead),
        differences=tuple(differences),
        faults=dict(Counter(str(a.fault) for a in ahead if a.fault is not None)),
        names=tuple(sorted(names)),
        rewards=means,
        unknown_weights=tuple(sorted(set(weights) - {name for some in names for name in some})) if names else (),
    )


def _bytes(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _played(pool: EnvironmentPool, numbers: Sequence[int], seed: int, replies: Sequence[str]) -> list[Attempt]:
    attempts = []
    for number, problem in zip(numbers, pool.problems(numbers, seed), strict=True):
        for kind in ("empty", "fixed", "right", *(("given",) if replies else ())):
            has_answer = isinstance(problem, bundles.EnvironmentProblem) and isinstance(problem.data.get(ANSWER), str)
            if kind != "right" or has_answer:
                attempts.append(Attempt(number=number, reply=kind, problem=problem))
    seated = [a for a in attempts if isinstance(a.problem, bundles.EnvironmentProblem)]
    pool.start(
        [((a.number, a.reply), a.problem) for a in seated if isinstance(a.problem, bundles.EnvironmentProblem)],
        groups=[a.number for a in seated],
    )
    going = seated
    for turn in range(MOST_TURNS):
        texts = [((a.number, a.reply), _text(a, turn, replies)) for a in going]
        for attempt, answer in zip(going, pool.reply(texts), strict=True):
            attempt.turns.append(answer)
        going = [a for a in going if isinstance(a.turns[-1], bundles.Turn) and not a.turns[-1].done]
    for attempt, rewards in zip(seated, pool.rewards([(a.number, a.reply) for a in seated]), strict=True):
        attempt.rewards = rewards
    return attempts


def _text(attempt: Attempt, turn: int, replies: Sequence[str]) -> str:
    if attempt.reply == "right" and isinstance(attempt.problem, bundles.EnvironmentProblem):
        return str(attempt.problem.data[ANSWER])
    if attempt.reply == "given":
        return replies[min(turn, len(replies) - 1)]
    return "The answer is 7." if attempt.reply == "fixed" else ""
