"""A model measured in an environment: it plays held-out problems, and its rewards are averaged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from surogate_core.plugin import bundles, inference
from surogate_core.service.inference import prompt_of_messages, prompt_of_text
from surogate_core.service.training import Subject, mean_stderr
from surogate_reinforcement.pool import EnvironmentPool

Key = tuple[int, int]
"""(number of the problem, number of the attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The figures of a model in an environment."""

    model: str
    environment: str
    problems: int
    samples: int
    """Attempts at each problem."""
    reward: float | None
    """Mean over the problems of the mean reward of their attempts; None if no attempt has one."""
    stderr: float
    """Standard error of the mean over the problems."""
    rewards: Mapping[str, float | None]
    """Name → mean over the attempts to which it applies."""
    solved: float
    """Share of the attempts whose reward reaches the bar."""
    pass_at: float
    """Share of the problems with at least one such attempt."""
    truncated: float
    """Share of the attempts that ended for lack of room or turns."""
    faults: Mapping[str, int]
    """Reason → attempts without a result."""
    turns: float
    """Replies of an attempt, on average."""
    tokens: float
    """Tokens of all replies of an attempt, on average."""
    difference: float | None = None
    """Reward minus that of the first model, over the problems that both have a reward for; None for the first."""
    difference_stderr: float | None = None
    """Standard error of the difference, from the problems in pairs."""
    by_problem: Mapping[int, float] = field(default_factory=dict, repr=False)
    """Number of a problem → mean reward of its attempts."""


def compared(first: Scores, other: Scores) -> Scores:
    """The figures of a model with their difference from those of the first model, problem by problem."""
    pairs = [
        other.by_problem[problem] - value for problem, value in first.by_problem.items() if problem in other.by_problem
    ]
    if not pairs:
        return other
    return replace(other, difference=_mean(pairs), difference_stderr=mean_stderr(pairs))


@dataclass(slots=True)
class _Attempt:
    key: Key
    problem: bundles.EnvironmentProblem
    messages: list[Mapping[str, Any]]
    turns: int = 0
    tokens: int = 0
    truncated: bool = False
    fault: bundles.Fault | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward: float | None = None

    def row(self) -> dict[str, Any]:
        return {
            "problem": self.key[0],
            "sample": self.key[1],
            "messages": self.messages,
            "rewards": dict(self.rewards),
            "reward": self.reward,
            "truncated": self.truncated,
            "fault": None if self.fault is None else str(self.fault),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePlan:
    """How a model is measured in an environment."""

    numbers: Sequence[int]
    """The numbers of the problems."""
    seed: int
    wanted: inference.PromptOptions
    """Tokens of a reply, attempts at a problem, and how tokens are chosen."""
    turns: int
    """Replies of an attempt at most."""
    weights: Mapping[str, float]
    bar: float
    """The reward from which an attempt counts as solved."""


def measure(
    subject: Subject, pool: EnvironmentPool, plan: ScorePlan, taken: Callable[[Mapping[str, Any]], None]
) -> Scores:
    """Play the problems. `taken` receives each attempt."""
    faults: Counter[str] = Counter()
    attempts = []
    for number, problem in zip(plan.numbers, pool.problems(plan.numbers, plan.seed), strict=True):
        if isinstance(problem, bundles.Fault):
            faults[problem.reason] += plan.wanted.samples
            continue
        attempts += [_Attempt((number, s), problem, list(problem.messages)) for s in range(plan.wanted.samples)]
    pool.start([(a.key, a.problem) for a in attempts], groups=[a.key[0] for a in attempts])
    going = attempts
    for turn in range(plan.turns):
        going = _turn(subject, pool, plan, going, turn)
    for attempt in going:
        attempt.truncated = True
    for attempt, rewards in zip(attempts, pool.rewards([a.key for a in attempts]), strict=True):
        if isinstance(rewards, bundles.Fault):
            attempt.fault = attempt.fault or rewards
            faults[attempt.fault.reason] += 1
        else:
            attempt.rewards, attempt.reward = rewards, bundles.total_reward(rewards, plan.weights)
        taken({"model": subject.name, **attempt.row()})
    return _scores(subject.name, pool.name, plan, attempts, faults)


def _turn(
    subject: Subject, pool: EnvironmentPool, plan: ScorePlan, going: Sequence[_Attempt], turn: int
) -> list[_Attempt]:
    """One reply of each attempt and the environment's answer; the attempts that go on."""
    prompts = [(a, _prompt(subject, a)) for a in going]
    room = subject.prepared.context
    for attempt in (a for a, prompt in prompts if len(prompt.ids) >= room):
        attempt.truncated = True
    prompts = [(a, prompt) for a, prompt in prompts if len(prompt.ids) < room]
    if not prompts:
        return []
    sampling = replace(plan.wanted.sampling, seed=plan.wanted.sampling.seed + turn)
    wanted = replace(plan.wanted, samples=1, sampling=sampling)
    texts = subject.complete([prompt for _, prompt in prompts], wanted, stage=f"{pool.name}, reply {turn + 1}")
    for (attempt, _), text in zip(prompts, texts, strict=True):
        attempt.messages.append({"role": "assistant", "content": text.text})
        attempt.turns, attempt.tokens = attempt.turns + 1, attempt.tokens + len(text.ids)
        attempt.truncated = text.reason == "length"
    answers = pool.reply([(a.key, text.text) for (a, _), text in zip(prompts, texts, strict=True)])
    left = []
    for (attempt, _), answer in zip(prompts, answers, strict=True):
        if isinstance(answer, bundles.Turn) and not answer.done and not attempt.truncated:
            attempt.messages += answer.messages
            left.append(attempt)
    return left


def _prompt(subject: Subject, attempt: _Attempt) -> inference.Prompt:
    name = f"problem {attempt.key[0]}"
    if subject.tokenizer.chat_template:
        return prompt_of_messages(subject.tokenizer, attempt.messages, tools=attempt.problem.tools, name=name)
    return prompt_of_text(subject.tokenizer, "\n".join(str(m["content"]) for m in attempt.messages), name=name)


def _scores(
    model: str, environment: str, plan: ScorePlan, attempts: Sequence[_Attempt], faults: Mapping[str, int]
) -> Scores:
    found: dict[int, list[float]] = {}
    named: dict[str, list[float]] = {}
    for attempt in attempts:
        if attempt.reward is not None:
            found.setdefault(attempt.key[0], []).append(attempt.reward)
        for name, value in attempt.rewards.items():
            named.setdefault(name, []).extend([] if value is None else [value])
    means = [_mean(some) for some in found.values()]
    rewards = [value for some in found.values() for value in some]
    count = max(1, len(attempts))
    return Scores(
        model=model,
        environment=environment,
        problems=len(plan.numbers),
        samples=plan.wanted.samples,
        reward=_mean(means) if means else None,
        stderr=mean_stderr(means) if means else math.nan,
        rewards={name: _mean(values) if values else None for name, values in sorted(named.items())},
        solved=_mean([float(value >= plan.bar) for value in rewards]) if rewards else 0.0,
        pass_at=_mean([float(max(some) >= plan.bar) for some in found.values()]) if found else 0.0,
        truncated=sum(a.truncated for a in attempts) / count,
        faults=dict(sorted(faults.items())),
        turns=sum(a.turns for a in attempts) / count,
        tokens=sum(a.tokens for a in attempts) / count,
        by_problem={problem: _mean(some) for problem, some in found.items()},
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
