"""Reward functions as TRL calls them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
from surogate_environment_trl import surogate_environment
from surogate_environment_trl.options import RewardFunctionOptions
from surogate_environment_trl.problems import build

from surogate_core.plugin import UserError, bundles
from surogate_testing import NotApplicable, environments

FUNCTIONS = """
import asyncio

def right(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]

def polite(prompts, completions, **kwargs):
    texts = [c[0]["content"] for c in completions]
    return [None if p[-1]["content"] == "?" else float("please" in t) for p, t in zip(prompts, texts)]

async def slow(completions, **kwargs):
    await asyncio.sleep(0)
    return [len(c) for c in completions]

def longest(completions, **kwargs):
    return [float(len(c) == max(map(len, completions))) for c in completions]

def short(completions, **kwargs):
    return [1.0] * (len(completions) + 1)

def wants_ids(completions, completion_ids): return []
def wants_more(completions, solution, **kwargs): return []
def strict(prompts, completions): return []
number = 3
"""
ROWS = [{"prompt": "1 + 1", "answer": "2"}, {"prompt": "1 + 2", "answer": "3"}]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    written(tmp_path / "rows.jsonl", ROWS)
    return tmp_path


def written(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def made(*functions: str, **changes: Any) -> Any:
    return build(
        RewardFunctionOptions(path="rows.jsonl", reward_funcs=[f"rewards.py:{f}" for f in functions], **changes)
    )


def rewards(environment: Any, number: int, text: str) -> dict[str, float | None]:
    episode = environment.start(environment.problem(number, seed=0))
    assert episode.reply(text).done
    return dict(episode.rewards())


@pytest.mark.parametrize("call", ["completion", "group"])
def test_it_conforms(place: Path, call: Any) -> None:
    options = RewardFunctionOptions(path="rows.jsonl", reward_funcs=["rewards.py:right"], call=call)
    spec = bundles.EnvironmentSpec(name="trl", build=lambda _: build(options), options=RewardFunctionOptions)
    for check in environments.CHECKS:
        with suppress(NotApplicable):
            check(spec)
    assert surogate_environment().build is not None


def test_functions_receive_columns_and_give_their_names_to_the_rewards(place: Path) -> None:
    environment = made("right", "slow")
    assert environment.size == 2
    assert environment.problem(1, seed=3).messages == ({"role": "user", "content": "1 + 2"},)
    assert rewards(environment, 0, "2") == {"right": 1.0, "slow": 1.0}
    assert rewards(environment, 1, "no") == {"right": 0.0, "slow": 2.0}


def test_conversations_are_answered_by_conversations(place: Path) -> None:
    written(place / "rows.jsonl", [{"prompt": [{"role": "user", "content": c}]} for c in ("?", "!")])
    environment = made("polite", system="Be kind.")
    assert [m["role"] for m in environment.problem(0, seed=0).messages] == ["system", "user"]
    assert rewards(environment, 0, "please") == {"polite": None}
    assert rewards(environment, 1, "please") == {"polite": 1.0}


def test_a_function_may_see_all_completions_of_a_prompt(place: Path) -> None:
    environment = made("longest", "right", call="group")
    episodes = [environment.start(environment.problem(0, seed=0)) for _ in range(3)]
    for episode, text in zip(episodes, ("2", "two", "no"), strict=True):
        episode.reply(text)
    assert all(episode.rewards() == {} for episode in episodes)
    found = environment.group_rewards(episodes)
    assert [one["longest"] for one in found] == [0.0, 1.0, 0.0]
    assert [one["right"] for one in found] == [1.0, 0.0, 0.0]


def test_held_out_prompts_follow(place: Path) -> None:
    written(place / "eval.jsonl", [{"prompt": "7", "answer": "7"}])
    environment = made("right", eval_path="eval.jsonl")
    assert (environment.size, environment.held_out) == (2, 1)
    assert rewards(environment, 2, "7") == {"right": 1.0}


def test_a_module_of_the_working_directory(place: Path) -> None:
    (place / "my_own_rewards.py").write_text(FUNCTIONS)
    options = RewardFunctionOptions(path="rows.jsonl", reward_funcs=["my_own_rewards:right"])
    assert rewards(build(options), 0, "2") == {"right": 1.0}


def test_a_wrong_number_of_rewards_is_a_fault_of_the_episode(place: Path) -> None:
    with pytest.raises(ValueError, match="short returned 2 rewards for 1 completions"):
        rewards(made("short"), 0, "2")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", r"rewards.py has no function 'nothing'"),
        ("number", r"has no function 'number'"),
        ("wants_ids", r"wants_ids wants completion_ids, which an environment does not have"),
        ("wants_more", r"wants_more wants solution, and the file has the columns prompt, answer"),
        ("strict", r"strict does not accept answer. Fix: add \*\*kwargs"),
    ],
)
def test_a_function_that_cannot_be_called_is_one_clear_message(place: Path, function: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(function)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_funcs": None}, "environment.reward_funcs is not set"),
        ({"path": ""}, "environment.path is not set"),
        ({"path": "other.jsonl"}, "environment.path other.jsonl: cannot be read"),
        ({"prompt": "question"}, r"rows.jsonl:1: the column 'question' has no text and no messages"),
        ({"reward_funcs": ["rewards.py:right", "my.py:right"]}, r"my.py cannot be imported: .*there is no file"),
        ({"reward_funcs": ["rewards.py"]}, "names no function; it is written module:function"),
        ({"reward_funcs": ["rewards.py:right", "rewards.py:right"]}, "two functions have the name right"),
        ({"reward_funcs": ["broken.py:f"]}, r"broken.py cannot be imported: ZeroDivisionError"),
    ],
)
def test_wrong_options_are_one_clear_message(place: Path, changes: dict[str, Any], message: str) -> None:
    (place / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=message):
        build(RewardFunctionOptions(**{"path": "rows.jsonl", "reward_funcs": ["rewards.py:right"], **changes}))


def test_the_environments_policy_forbids_code_that_is_no_plugins(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUROGATE_PLUGINS_ALLOW", "environment-trl")
    with pytest.raises(UserError, match=r"rewards.py:right is not in the package of a plugin, and SUROGATE_PLUGINS_"):
        made("right")


@pytest.mark.parametrize("call", ["completion", "group"])
def test_without_functions_there_are_prompts_and_no_rewards(place: Path, call: Literal["completion", "group"]) -> None:
    environment = build(RewardFunctionOptions(path="rows.jsonl", reward_funcs=[], call=call))
    episode = environment.start(environment.problem(0, 0))
    assert episode.reply("?").done
    assert episode.rewards() == {}
