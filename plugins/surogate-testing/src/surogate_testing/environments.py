"""Checks of environments: problems that repeat and are plain data, episodes that survive a move, finite rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from surogate_core.plugin import SurogateError, bundles
from surogate_testing.check import NotApplicable, ensure

PROBLEMS = 5
TURNS = 20
SEED = 7
REPLY = "The answer is 7."


def _built(spec: bundles.EnvironmentSpec) -> bundles.Environment:
    try:
        return spec.build(spec.options())
    except SurogateError as error:
        raise NotApplicable(f"it needs options or a package: {error}") from error


def _plain(problem: bundles.EnvironmentProblem) -> str:
    return json.dumps([list(problem.messages), dict(problem.data), list(problem.tools)], sort_keys=True)


def _played(environment: bundles.Environment, problem: bundles.EnvironmentProblem) -> Mapping[str, float | None]:
    episode = environment.start(problem)
    for _ in range(TURNS):
        turn = episode.reply(REPLY)
        ensure(isinstance(turn, bundles.Turn), f"reply returned {turn!r:.80}, not a Turn")
        ensure(turn.done != bool(turn.messages), "a turn has messages if and only if the episode goes on")
        if turn.done:
            break
    return episode.rewards()


def has_tasks_that_repeat(spec: bundles.EnvironmentSpec) -> None:
    """The same number and seed give the same problem, of JSON values, in another environment of the same options."""
    first, second = _built(spec), _built(spec)
    for number in range(min(PROBLEMS, first.size or PROBLEMS)):
        problem = first.problem(number, SEED)
        ensure(bool(problem.messages), "a problem has no message")
        ensure(all({"role", "content"} <= m.keys() for m in problem.messages), "a message lacks role or content")
        ensure(_plain(problem) == _plain(second.problem(number, SEED)), f"problem {number} differs the second time")


def gives_finite_rewards_of_equal_names(spec: bundles.EnvironmentSpec) -> None:
    """Every reward is a finite number or None; every episode has the same names, with those of `weights` among them."""
    environment = _built(spec)
    problems = [environment.problem(number, SEED) for number in range(min(PROBLEMS, environment.size or PROBLEMS))]
    found = [_played(environment, problem) for problem in problems]
    if not hasattr(environment, "group_rewards"):
        ensure(bool(found[0]), "there is no reward")
        ensure(spec.weights.keys() <= found[0].keys(), f"weights {dict(spec.weights)} of rewards {sorted(found[0])}")
    for rewards in found:
        ensure(rewards.keys() == found[0].keys(), f"the names differ: {sorted(rewards)} and {sorted(found[0])}")
        for name, value in rewards.items():
            is_number = isinstance(value, int | float) and math.isfinite(value)
            ensure(value is None or is_number, f"reward {name} is {value!r}")


def judges_an_episode_without_a_reply(spec: bundles.EnvironmentSpec) -> None:
    """A model may have no room for a reply."""
    environment = _built(spec)
    environment.start(environment.problem(0, SEED)).rewards()


def plays_an_episode_again(spec: bundles.EnvironmentSpec) -> None:
    """A problem that went through JSON, in another environment of the same options, gives the same rewards."""
    first, second = _built(spec), _built(spec)
    problem = first.problem(0, SEED)
    messages, data, tools = json.loads(_plain(problem))
    moved = bundles.EnvironmentProblem(messages=tuple(messages), data=data, tools=tuple(tools))
    if spec.deterministic:
        ensure(_played(first, problem) == _played(second, moved), "the rewards differ")


def compares_attempts_at_one_task(spec: bundles.EnvironmentSpec) -> None:
    """`group_rewards`, if there is one, returns finite rewards of equal names for each attempt."""
    environment = _built(spec)
    compare = getattr(environment, "group_rewards", None)
    if compare is None:
        raise NotApplicable("it does not compare attempts")
    problem = environment.problem(0, SEED)
    attempts = [environment.start(problem) for _ in range(3)]
    for attempt in attempts[:2]:
        attempt.reply(REPLY)
    found = compare(attempts)
    ensure(len(found) == len(attempts), f"it returned {len(found)} rewards for {len(attempts)} attempts")
    ensure(all(rewards.keys() == found[0].keys() for rewards in found), "the names differ between attempts")
    numbers = [value for rewards in found for value in rewards.values() if value is not None]
    ensure(all(isinstance(n, int | float) and math.isfinite(n) for n in numbers), "a reward is not a finite number")


CHECKS = (
    has_tasks_that_repeat,
    gives_finite_rewards_of_equal_names,
    judges_an_episode_without_a_reply,
    plays_an_episode_again,
    compares_attempts_at_one_task,
)
"""The checks for a plugin."""
