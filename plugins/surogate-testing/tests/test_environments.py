"""The checks of environments find what is wrong with one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from surogate_core.plugin import UserError, bundles
from surogate_reinforcement.episodes import OneReply, user_says
from surogate_testing.check import NotApplicable
from surogate_testing.suites import bundle_checks

COUNTER = itertools.count()


class Sound:
    size: int | None = None

    def problem(self, number: int, seed: int) -> bundles.EnvironmentProblem:
        return bundles.EnvironmentProblem(messages=user_says(f"{number} {seed}"), data={"number": number})

    def start(self, problem: bundles.EnvironmentProblem) -> Any:
        return OneReply(problem, self.judged)

    def judged(self, problem: bundles.EnvironmentProblem, text: str) -> Mapping[str, Any]:
        return {"length": len(text)}


class Restless(Sound):
    def problem(self, number: int, seed: int) -> bundles.EnvironmentProblem:
        return bundles.EnvironmentProblem(messages=user_says(f"{next(COUNTER)}"))


class Endless(Sound):
    def judged(self, problem: bundles.EnvironmentProblem, text: str) -> Mapping[str, Any]:
        return {"length": float("inf")}


class Changing(Sound):
    def judged(self, problem: bundles.EnvironmentProblem, text: str) -> Mapping[str, Any]:
        return {f"length {problem.data['number']}": 1.0}


class Drifting(Sound):
    def judged(self, problem: bundles.EnvironmentProblem, text: str) -> Mapping[str, Any]:
        return {"length": float(next(COUNTER))}


class Needy(Sound):
    def judged(self, problem: bundles.EnvironmentProblem, text: str) -> Mapping[str, Any]:
        return {"length": float(text[0] == "T")}


class Talkative(Sound):
    def start(self, problem: bundles.EnvironmentProblem) -> Any:
        class Episode(OneReply):
            def reply(self, text: str) -> bundles.Turn:
                return bundles.Turn(messages=user_says("bye"), done=True)

        return Episode(problem, self.judged)


class Short(Sound):
    def group_rewards(self, episodes: Any) -> Any:
        return []


class Refusing(Sound):
    def __init__(self) -> None:
        raise UserError("environment.path is not set")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Sound, None),
        (Restless, "problem 0 differs the second time"),
        (Endless, "reward length is inf"),
        (Changing, "the names differ"),
        (Drifting, "the rewards differ"),
        (Needy, "IndexError"),
        (Talkative, "a turn has messages if and only if the episode goes on"),
        (Short, "it returned 0 rewards for 3 attempts"),
        (Refusing, None),
    ],
)
def test_faults_are_found(build: Callable[[], Any], message: str | None) -> None:
    assert found_with(bundles.EnvironmentSpec(name="x", build=lambda options: build()))[: 1 if message else None] == (
        [] if message is None else [message]
    )


def test_weights_of_no_reward_are_found() -> None:
    spec = bundles.EnvironmentSpec(name="x", build=lambda options: Sound(), weights={"size": 0.0})
    assert found_with(spec) == ["weights {'size': 0.0} of rewards ['length']"]


def found_with(spec: bundles.EnvironmentSpec) -> list[str]:
    """What the checks raise, cut to the messages of this file."""
    found = []
    for check in bundle_checks("environment", spec):
        try:
            check.run()
        except NotApplicable:
            continue
        except Exception as error:
            found.append(str(error))
    return [next((known for known in KNOWN if known in text), text) for text in found]


KNOWN = (
    "problem 0 differs the second time",
    "reward length is inf",
    "the names differ",
    "the rewards differ",
    "IndexError",
    "a turn has messages if and only if the episode goes on",
    "it returned 0 rewards for 3 attempts",
    "weights {'size': 0.0} of rewards ['length']",
)
