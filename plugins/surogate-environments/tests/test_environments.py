"""The environments ask what they say they ask, and judge replies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from surogate_environments import surogate_environment
from surogate_environments.expressions import ExpressionError, evaluate, shown

from surogate_core.plugin import UserError, bundles
from surogate_testing.suites import bundle_checks

SPECS = {spec.name: spec for spec in surogate_environment()}


def built(name: str, **options: Any) -> Any:
    return SPECS[name].build(SPECS[name].options(**options))


def rewards(environment: Any, problem: bundles.EnvironmentProblem, *replies: str) -> dict[str, Any]:
    episode = environment.start(problem)
    turns = [episode.reply(reply) for reply in replies]
    assert [turn.done for turn in turns] == [False] * (len(turns) - 1) + [True]
    return dict(episode.rewards())


@pytest.mark.parametrize("name", SPECS)
def test_it_conforms(name: str) -> None:
    for check in bundle_checks("environment", SPECS[name]):
        if name == "problems":
            with pytest.raises(Exception, match=r"environment\.path is not set"):
                check.call()
        else:
            check.call()


def test_copy_and_reverse() -> None:
    for name in ("copy", "reverse"):
        environment = built(name, length=3, alphabet="xyz")
        problem = environment.problem(0, 1)
        asked = problem.messages[0]["content"].partition(": ")[2]
        right = asked if name == "copy" else asked[::-1]
        assert problem.data["answer"] == right
        assert rewards(environment, problem, right.replace(" ", "")) == {"match": 1.0, "exact": 1.0}
        assert rewards(environment, problem, f"<think>hm</think> {right}")["match"] == 1.0
        assert rewards(environment, problem, right[:1])["match"] == pytest.approx(1 / 3)
        assert rewards(environment, problem, right + " x y z")["match"] == 0.5
        assert rewards(environment, problem, "") == {"match": 0.0, "exact": 0.0}
        assert bundles.total_reward({"match": 0.5, "exact": 1.0}, SPECS[name].weights) == 0.5


def test_lengths_of_copy() -> None:
    environment = built("copy", length=6, min_length=2)
    lengths = {len(environment.problem(n, 0).data["answer"].split()) for n in range(60)}
    assert lengths == {2, 3, 4, 5, 6}
    environment = built("copy", length=3)
    assert {len(environment.problem(n, 0).data["answer"].split()) for n in range(20)} == {3}
    with pytest.raises(UserError, match=r"environment.min_length: is 5, and environment.length 4"):
        built("copy", length=4, min_length=5)


def test_arithmetic() -> None:
    environment = built("arithmetic", digits=2, operators="+-*")
    for number in range(30):
        problem = environment.problem(number, 3)
        question = problem.messages[0]["content"].removeprefix("What is ").removesuffix("?")
        answer = evaluate(question)
        assert answer >= 0
        assert rewards(environment, problem, f"It is {shown(answer)}.") == {"correct": 1.0}
        assert rewards(environment, problem, f"It is {shown(answer + 1)}.") == {"correct": 0.0}
    with pytest.raises(UserError, match=r"environment.operators: '/' is not available"):
        built("arithmetic", operators="+/")


def test_countdown_has_a_solution_and_takes_no_other_numbers() -> None:
    environment = built("countdown", numbers=4)
    for number in range(30):
        problem = environment.problem(number, 3)
        assert rewards(environment, problem, problem.data["answer"]) == {"correct": 1.0, "valid": 1.0}
    target = problem.data["target"]
    assert rewards(environment, problem, f"<answer>{target}</answer>") == {"correct": 0.0, "valid": 0.0}
    first = problem.data["numbers"][0]
    assert rewards(environment, problem, f"<answer>{first}</answer>") == {"correct": 0.0, "valid": 1.0}
    assert rewards(environment, problem, "<answer>(</answer>")["valid"] == 0.0
    assert rewards(environment, problem, "no idea")["valid"] == 0.0


@pytest.mark.parametrize("call", ["tag", "json"])
def test_the_calculator_answers_until_the_model_does(call: str) -> None:
    environment = built("tool-calculator", call=call)
    problem = environment.problem(0, 1)
    question = problem.messages[0]["content"].partition("What is ")[2].partition("?")[0]
    assert bool(problem.tools) == (call == "json")

    def called(expression: str) -> str:
        if call == "tag":
            return f"<calculator>{expression}</calculator>"
        return f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': expression}})}</tool_call>"

    episode = environment.start(problem)
    turn = episode.reply(called("1 / 0"))
    assert turn.messages[0]["content"] == "Error: division by zero."
    assert turn.messages[0]["role"] == ("user" if call == "tag" else "tool")
    turn = episode.reply(called(question))
    assert turn.messages[0]["content"] == problem.data["answer"]
    assert episode.reply(problem.data["answer"]).done
    assert episode.rewards() == {"correct": 1.0, "calls": 2.0}

    episode = environment.start(problem)
    turns = [episode.reply(called(question)) for _ in range(4)]
    assert [turn.done for turn in turns] == [False, False, False, True]
    assert episode.rewards() == {"correct": 0.0, "calls": 3.0}


def test_broken_calls_get_an_error() -> None:
    environment = built("tool-calculator", call="json")
    episode = environment.start(environment.problem(0, 1))
    for text in ("<tool_call>{</tool_call>", '<tool_call>{"arguments": 3}</tool_call>', "<tool_call>[]</tool_call>"):
        assert "Error" in episode.reply(text).messages[0]["content"]


def test_problems_of_a_file(tmp_path: Path) -> None:
    file, held_out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "two #### 2"}\n\n{"question": "2?", "answer": 2.5}\n')
    held_out.write_text('{"question": "City?", "answer": "Paris"}\n')
    environment = built("problems", path=str(file), eval_path=str(held_out), system="Be brief.")
    assert (environment.size, environment.held_out) == (2, 1)
    problem = environment.problem(0, 1)
    assert [m["role"] for m in problem.messages] == ["system", "user"]
    assert problem.messages[1]["content"].startswith("1 + 1?\n\nThink")
    assert rewards(environment, problem, r"I think \boxed{2}") == {"correct": 1.0}
    assert rewards(environment, environment.problem(1, 1), "5/2") == {"correct": 1.0}
    assert rewards(environment, environment.problem(2, 1), r"\boxed{paris}") == {"correct": 1.0}


def test_problems_of_two_splits(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        rows = [{"question": f"{split} {n}", "answer": n} for n in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = built("problems", path=str(tmp_path), eval_split="test", prompt="{question}")
    assert (environment.size, environment.held_out) == (3, 2)
    assert [environment.problem(n, 0).messages[0]["content"] for n in (2, 3)] == ["train 2", "test 0"]
    environment = built("problems", path=str(tmp_path), held_out=2, prompt="{question}")
    assert (environment.size, environment.held_out) == (1, 2)
    assert environment.problem(2, 0).messages[0]["content"] == "train 2"
    with pytest.raises(UserError, match=r"environment.held_out: .* has 3 problems. Fix: fewer"):
        built("problems", path=str(tmp_path), held_out=3)
    with pytest.raises(UserError, match=r"environment.held_out: eval_path or eval_split is set too"):
        built("problems", path=str(tmp_path), held_out=1, eval_split="test")
    with pytest.raises(UserError, match=r"environment.eval_path: .* has the problems of environment.path again"):
        built("problems", path=str(tmp_path), eval_path=str(tmp_path / "train.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no problem"),
        ("{\n", "a.jsonl:1: "),
        ('{"question": "a"}\n', "a.jsonl:1: the field 'answer' has no text"),
        ('{"question": "a", "answer": true}\n', "a.jsonl:1: the field 'answer' has no text"),
        ("3\n", "a.jsonl:1: "),
    ],
)
def test_files_that_have_no_problems(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        built("problems", path=str(tmp_path / "a.jsonl"))
    with pytest.raises(UserError, match="no such file or directory"):
        built("problems", path=str(tmp_path / "none"))


@pytest.mark.parametrize(
    "text",
    [
        "2 ** 999",
        "__import__('os')",
        "(" * 150 + "1",
        "a",
        "1 if 1 else 2",
        "1e999",
        "9" * 40,
        "'a' * 9",
        "",
    ],
)
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)


def test_values_of_expressions() -> None:
    assert shown(evaluate("(1 + 2) * 3 - 4 / 8")) == "8.5"
    assert shown(evaluate("-2 × 3")) == "-6"
