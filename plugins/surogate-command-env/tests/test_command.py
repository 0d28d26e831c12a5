"""`surogate env`: the command, its words, what a check finds wrong, and pairs of models."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from surogate_command_env.command import USAGE, main, wrong_with
from surogate_command_env.scores import Scores, compared

from surogate_core.plugin import UserError
from surogate_reinforcement.checking import Checked

SUROGATE_PLUGIN = "command-env"


def test_conformance(surogate_check):
    surogate_check.run()


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == USAGE


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, None),
        ({"names": (("a",), ("b",))}, "the names of the rewards differ between episodes. Fix: None for one that"),
        ({"names": ((),)}, "there is no reward."),
        ({"unknown_weights": ("b",)}, "weights of rewards that there are not: b."),
        ({"faults": {"exception": 1}}, None),
        ({"faults": {"exception": 1, "timeout": 3}}, "every episode fails."),
    ],
)
def test_what_is_wrong_with_rewards(changes: dict[str, Any], line: str | None) -> None:
    sound = Checked(
        problems=2, episodes=4, differences=(), faults={}, names=(("a",),), rewards={"fixed": 1.0}, unknown_weights=()
    )
    found = wrong_with(replace(sound, **changes), declared=True)
    assert [one[: len(line or "")] for one in found] == ([line] if line else [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chek", "copy"], "surogate env: there is no command 'chek'. Fix: surogate env check"),
        (["check"], "surogate env check: takes one name; got none. Fix: surogate env check NAME"),
        (["eval", "copy"], "takes a model and the name of an environment; got copy."),
        (["list", "copy"], "surogate env list: takes no name; got copy."),
        (["list", "length=3"], "surogate env list: takes no options; got length=3. Fix: leave it out"),
        (["check", "copy", "--solved"], "surogate env check: --solved is not for this command. Fix: leave it out"),
        (["eval", "m", "copy", "--reply", "a"], "--reply is not for this command"),
    ],
)
def test_wrong_words(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        main(words)
    assert message in str(error.value)


def test_a_model_is_compared_with_the_first_task_by_task() -> None:
    first = Scores(
        model="a", environment="e", problems=3, samples=1, reward=1.0, stderr=0.0, rewards={}, solved=1.0, pass_at=1.0,
        truncated=0.0, faults={}, turns=1.0, tokens=2.0, by_problem={0: 1.0, 1: 2.0, 2: 3.0},
    )  # fmt: skip
    found = compared(first, replace(first, model="b", by_problem={1: 2.5, 2: 4.5, 7: 100.0}))
    assert found.difference == 1.0, "over the problems that both have"
    assert found.difference_stderr == pytest.approx(0.5)
    assert compared(first, replace(first, by_problem={9: 1.0})).difference is None
    one = compared(first, replace(first, by_problem={0: 1.0}))
    assert one.difference == 0.0
    assert math.isnan(float(one.difference_stderr or 0.0))
