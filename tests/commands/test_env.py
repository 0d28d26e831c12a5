"""`surogate env`: what is installed, problems, a check that finds what does not repeat, and the rewards of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.cli.main import main

SOURCE = """
import time
from surogate_core import bundles, hookimpl
from surogate_reinforcement.episodes import OneReply, user_says

class Problems:
    size = 3

    def __init__(self, judge, answer="yes"):
        self.judge, self.answer, self.played = judge, answer, 0

    def problem(self, number, seed):
        return bundles.EnvironmentProblem(messages=user_says("yes or no?"), data={"answer": self.answer})

    def start(self, problem):
        return OneReply(problem, self._judged)

    def _judged(self, problem, text):
        self.played += 1
        return self.judge(self, problem, text)

def order(env, problem, text):
    return {"order": float(env.played)}

def failing(env, problem, text):
    raise ValueError("no rewards")

def large(env, problem, text):
    return {"tokens": 1.0, "score": 1e308}

def hangs(options):
    time.sleep(600)

def spec(name, judge, deterministic=True):
    return bundles.EnvironmentSpec(name=name, build=lambda options: Problems(judge), deterministic=deterministic)

@hookimpl
def surogate_environment():
    return [
        spec("order", order),
        spec("honest", order, deterministic=False),
        spec("failing", failing),
        spec("large", large),
        bundles.EnvironmentSpec(name="hangs", build=hangs),
        bundles.EnvironmentSpec(name="number", build=lambda options: Problems(order, answer=7)),
    ]
"""
Env = Callable[..., str]


@pytest.fixture
def env(capsys: pytest.CaptureFixture[str]) -> Env:
    """``env("check", "copy", code=0)`` → what it prints."""

    def call(*words: Any, code: int = 0) -> str:
        capsys.readouterr()
        assert main(["env", *map(str, words)]) == code, capsys.readouterr()
        printed = capsys.readouterr()
        return printed.out if code != 2 else printed.err

    return call


def test_what_is_installed(env: Env) -> None:
    head, *lines = env("list").splitlines()
    assert head.split() == ["environment", "plugin", "options"]
    assert [line.split()[0] for line in lines] == sorted(line.split()[0] for line in lines)
    found = {row["name"]: row for row in json.loads(env("list", "--json"))}
    assert found["countdown"]["options"]["numbers"] == 3
    assert found["countdown"]["weights"] == {"valid": 0.1}
    assert found["countdown"]["deterministic"] is True


def test_tasks_are_printed_and_solved(env: Env, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in env("problems", "arithmetic", "digits=2", "--limit", 3).splitlines()]
    assert [row["number"] for row in rows] == [0, 1, 2]
    file = tmp_path / "rows.jsonl"
    env("problems", "arithmetic", "digits=2", "--limit", 3, "--solved", "--output", file)
    solved = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert solved == [[*row["messages"], {"role": "assistant", "content": row["data"]["answer"]}] for row in rows]
    held_out = json.loads(env("problems", "arithmetic", "digits=2", "--limit", 1, "--held-out", "--seed", 3))
    assert held_out["number"] == 2**40


def test_a_sound_environment_passes_the_check(env: Env) -> None:
    out = env("check", "copy", "length=3", "--limit", 4)
    assert "copy: 7 problems, 21 episodes: all equal the second time" in out
    assert "rewards: exact match" in out
    assert "right 1.000" in out
    values = json.loads(
        env("check", "tool-calculator", "--limit", 2, "--reply", "<calculator>1</calculator>", "--json")
    )
    assert values["deterministic"]
    assert values["wrong"] == []
    assert values["rewards"].keys() == {"empty", "fixed", "right", "given"}


def test_the_check_finds_what_does_not_repeat(env: Env, install_plugin: Any) -> None:
    install_plugin("odd", SOURCE)
    out = env("check", "order", "--limit", 3, code=1)
    assert "order: 3 problems, 9 episodes: 6 differ the second time" in out
    assert "different: problem " in out
    assert "wrong: it says that it is deterministic and is not. Fix: draw every choice from the problem's number" in out
    assert "6 differ the second time" in env("check", "honest", "--limit", 3)
    out = env("check", "failing", "--limit", 3, code=1)
    assert "9 times exception: ValueError: no rewards" in out
    assert "wrong: every episode fails." in out
    assert "problem 1 has no text `answer` in its data" in env("problems", "number", "--limit", 1, "--solved", code=2)


def test_a_reward_that_overflows_is_named(env: Env, install_plugin: Any) -> None:
    """The mean was `inf`, and no line said why."""
    install_plugin("odd", SOURCE)
    out = env("check", "large", "--limit", 1, code=1)
    assert "times invalid: reward 'score' is 1e+308, which overflows in sums; at most 1e+18" in out


def test_a_build_that_hangs_ends_at_the_limit_that_is_given(env: Env, install_plugin: Any) -> None:
    install_plugin("odd", SOURCE)
    for flags in (("--timeout", 0.5), ("--build-timeout", 0.5, "--timeout", 60)):
        error = env("check", "hangs", *flags, code=2)
        assert "environment=hangs: it cannot be built: timeout: the build took more than 0.5 s. Fix: a larger" in error
        assert "--build-timeout, or its options, or the code of plugin odd" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "cpoy"], "there is no such environment; known: arithmetic, copy, "),
        (["check", "copy", "lenght=3"], "lenght (command line): there is no such key."),
        (["check", "copy", "length=many"], "environment.length (command line): must be a whole number"),
        (["check", "problems"], "environment=problems: environment.path is not set. Fix: environment.path="),
        (["problems", "copy", "--seed", "-1"], "--seed -1: must be at least 0"),
        (["problems", "copy", "--timeout", "0"], "--timeout 0: must be at least 0.01"),
        (["problems", "copy", "--output", "/"], "--output /: is a directory"),
    ],
)
def test_wrong_words(words: list[str], message: str, env: Env) -> None:
    assert message in env(*words, code=2)


def test_models_are_measured_and_compared(env: Env, hf_dir: Path, model_copy: Path, tmp_path: Path) -> None:
    file = tmp_path / "attempts.jsonl"
    options = ["copy", "length=2", "min_length=1", "device=cpu", "--max-new-tokens", 4]
    words = ["eval", hf_dir, model_copy, *options, "--limit", 3, "--samples", 2]
    found, again = json.loads(env(*words, "--output", file, "--json"))
    assert (found["environment"], found["problems"], found["samples"]) == ("copy", 3, 2)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["model"] for row in rows] == [str(hf_dir)] * 6 + [str(model_copy)] * 6
    rows = rows[:6]
    assert [(row["problem"] - 2**40, row["sample"]) for row in rows] == [(t, s) for t in range(3) for s in range(2)]
    assert [m["role"] for m in rows[0]["messages"]] == ["user", "assistant"]
    assert found["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 6)
    assert found["rewards"]["match"] == pytest.approx(found["reward"])
    assert found["truncated"] == sum(row["truncated"] for row in rows) / 6
    assert found["difference"] is None
    same = {"model": str(model_copy), "difference": 0.0, "difference_stderr": 0.0}
    assert again == {**found, **same}, "equal weights make equal replies"
    lines = env("eval", hf_dir, *options, "--limit", 2, "--train").splitlines()
    assert lines[0] == "copy: 2 problems, 1 attempts each"
    assert lines[1].startswith("reward ")


def test_a_model_is_measured_over_several_turns(env: Env, hf_dir: Path, tmp_path: Path, install_plugin: Any) -> None:
    source = """
from surogate_core import bundles, hookimpl

class Episode:
    def __init__(self, problem):
        self.turns = 0

    def reply(self, text):
        self.turns += 1
        if self.turns < 3:
            return bundles.Turn(messages=({"role": "user", "content": "again"},), done=False)
        if text is None:
            raise ValueError
        return bundles.Turn(done=True)

    def rewards(self):
        return {"turns": self.turns, "never": None}

class Asking:
    size = 2
    held_out = 1

    def problem(self, number, seed):
        if number == 1:
            raise ValueError("no problem")
        return bundles.EnvironmentProblem(messages=({"role": "user", "content": "hello"},))

    def start(self, problem):
        return Episode(problem)

@hookimpl
def surogate_environment():
    return bundles.EnvironmentSpec(name="asking", build=lambda options: Asking())
"""
    install_plugin("asking", source)
    file = tmp_path / "rows.jsonl"
    words = ["eval", hf_dir, "asking", "device=cpu", "--max-new-tokens", 64, "--output", file]
    (found,) = json.loads(env(*words, "--train", "--json"))
    assert (found["problems"], found["faults"]) == (2, {"exception": 1})
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert row["reward"] == row["rewards"]["turns"] == found["turns"]
    assert row["rewards"]["never"] is None
    assert found["rewards"] == {"never": None, "turns": found["turns"]}
    assert len(row["messages"]) == 2 * found["turns"]
    assert json.loads(env(*words, "--max-turns", 1, "--json"))[0]["truncated"] == 1.0
