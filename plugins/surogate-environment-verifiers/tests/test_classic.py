"""Environments of verifiers 0.1; without that line of the package these tests are skipped."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from surogate_environment_verifiers.loading import load
from surogate_environment_verifiers.options import VerifiersOptions

from surogate_core.plugin import UserError, bundles
from surogate_testing import NotApplicable, environments

verifiers = pytest.importorskip("verifiers")
if not hasattr(verifiers, "MultiTurnEnv"):
    pytest.skip("verifiers is of another line", allow_module_level=True)

MODULE = '''
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"{a} + 1?", "answer": str(a + 1), "info": {"kind": "sum"}} for a in range(5)]


def right(completion, answer, **kwargs):
    return float(completion[-1]["content"].strip() == answer)


def length(completion):
    return float(len(completion))


def best(completions, **kwargs) -> list[float]:
    sizes = [len(c[-1]["content"]) for c in completions]
    return [float(size == max(sizes)) for size in sizes]


def breaks(completion):
    return 1 / 0


class Hint(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        if "please" in str(messages[-1]["content"]):
            state["final_env_response"] = [{"role": "user", "content": "That is all."}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"Wrong, try again ({len(messages)})."}]


class Rewriting(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "x"}]

    async def get_prompt_messages(self, state):
        found = await super().get_prompt_messages(state)
        return found if len(state["trajectory"]) == 0 else found[-1:]


class Broken(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        raise vf.InfraError("no sandbox")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def load_environment(kind="single", funcs=("right", "length"), weights=(1.0, 0.0), judge=False, rows=5):
    if kind == "nothing":
        return 3
    functions = [globals()[name] for name in funcs]
    rubric = vf.JudgeRubric(judge_client=object()) if judge else vf.Rubric(funcs=functions, weights=list(weights))
    data = Dataset.from_list(ROWS[:rows])
    held_out = Dataset.from_list(ROWS[:2])
    shared = {"dataset": data, "eval_dataset": held_out, "rubric": rubric, "system_prompt": "Calculate."}
    made = {"hint": Hint, "rewriting": Rewriting, "broken": Broken}
    if kind == "tool":
        return vf.ToolEnv(tools=[add], max_turns=4, **shared)
    return made[kind](max_turns=3, **shared) if kind in made else vf.SingleTurnEnv(**shared)
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vf_demo_env.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def made(**args: Any) -> Any:
    return load(VerifiersOptions(module="vf_demo_env", args=args))


def test_it_conforms() -> None:
    spec = bundles.EnvironmentSpec(name="verifiers", build=lambda _: made(), options=VerifiersOptions)
    for check in environments.CHECKS:
        with suppress(NotApplicable):
            check(spec)


def test_one_turn() -> None:
    environment = made()
    assert (environment.size, environment.held_out) == (5, 2)
    problem = environment.problem(2, seed=0)
    assert [m["role"] for m in problem.messages] == ["system", "user"]
    assert problem.messages[1]["content"] == "2 + 1?"
    for text, reward in (("3", 1.0), ("4", 0.0)):
        episode = environment.start(problem)
        assert episode.reply(text).done
        assert episode.rewards() == {"right": reward}
    assert environment.start(problem).rewards() == {"right": 0.0}, "a model may have no room for a reply"


def test_several_turns_and_what_the_environment_says() -> None:
    environment = made(kind="hint", funcs=["length"], weights=[0.5])
    episode = environment.start(environment.problem(0, seed=0))
    turn = episode.reply("7")
    assert turn.messages == ({"role": "user", "content": "Wrong, try again (3)."},)
    assert not turn.done
    other = environment.start(environment.problem(1, seed=0))  # two episodes side by side
    assert episode.reply("tell me, please").done
    assert not other.reply("8").done
    assert episode.rewards() == {"length": 0.5 * 4}, "two replies and two messages of the environment"
    assert other.rewards() == {"length": 0.5 * 1}, "an episode may end before it is done"


def test_turns_end_at_the_environments_limit() -> None:
    environment = made(kind="hint", funcs=["length"], weights=[1.0])
    episode = environment.start(environment.problem(0, seed=0))
    assert [episode.reply("no").done for _ in range(3)] == [False, False, True]
    assert episode.reply("more").done


def test_tools() -> None:
    environment = made(kind="tool")
    problem = environment.problem(1, seed=0)
    assert problem.tools[0]["function"]["name"] == "add"
    episode = environment.start(problem)
    turn = episode.reply('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>')
    assert turn.messages == ({"role": "tool", "content": "2"},)
    assert episode.reply("2").done
    assert episode.rewards() == {"right": 1.0}


def test_rewards_that_compare_a_group() -> None:
    environment = made(funcs=["best", "right"], weights=[1.0, 2.0])
    episodes = [environment.start(environment.problem(1, seed=0)) for _ in range(2)]
    for episode, text in zip(episodes, ("2", "two"), strict=True):
        episode.reply(text)
        assert episode.rewards() == {}
    assert environment.group_rewards(episodes) == [{"best": 0.0, "right": 2.0}, {"best": 1.0, "right": 0.0}]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"funcs": ["breaks"], "weights": [1.0]}, "Error calling reward function breaks: .*division"),
        ({"kind": "broken"}, "the environment failed: InfraError"),
        ({"kind": "rewriting"}, "the environment rewrites the conversation"),
    ],
)
def test_what_fails_is_a_fault_of_the_episode(args: dict[str, Any], message: str) -> None:
    environment = made(**args)
    episode = environment.start(environment.problem(0, seed=0))

    def play() -> None:
        episode.reply("1")
        episode.rewards()

    with pytest.raises(RuntimeError, match=message):
        play()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": {"judge": True}}, "is judged by a model behind an API"),
        ({"args": {"kind": "nothing"}}, "vf_demo_env makes a int"),
        ({"args": {"none": 1}}, "vf_demo_env cannot be loaded: TypeError: .*none"),
        ({"module": "vf_no_such_env"}, "vf_no_such_env cannot be loaded: ModuleNotFoundError"),
        ({"module": "json"}, "json has no function load_environment"),
    ],
)
def test_wrong_options_are_one_clear_message(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(VerifiersOptions(**{"module": "vf_demo_env", **options}))
