"""Data sets of reasoning-gym; without the package these tests are skipped."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from surogate_environment_reasoning_gym import surogate_environment
from surogate_environment_reasoning_gym.options import ReasoningGymOptions
from surogate_environment_reasoning_gym.problems import ReasoningGym

from surogate_core.plugin import UserError, bundles
from surogate_testing import environments

EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def made(**changes: Any) -> ReasoningGym:
    return ReasoningGym(ReasoningGymOptions(**{"config": EASY, **changes}))


def scored(environment: ReasoningGym, problem: bundles.EnvironmentProblem, reply: str) -> dict[str, float | None]:
    episode = environment.start(problem)
    assert episode.reply(reply).done
    return dict(episode.rewards())


@pytest.mark.parametrize("check", environments.CHECKS, ids=lambda check: check.__name__)
def test_it_conforms(check: Any) -> None:
    check(surogate_environment())


def test_a_right_answer_in_tags_is_worth_one() -> None:
    environment = made()
    problem = environment.problem(3, seed=5)
    answer = problem.data["answer"].removeprefix("<answer>").removesuffix("</answer>")
    assert problem.data["question"] in problem.messages[-1]["content"]
    right = {"score": 1.0, "answered": 1.0, "failed": 0.0}
    assert scored(environment, problem, f"It is <answer>{answer}</answer>") == right
    thought = f"<think><answer>{answer}</answer></think> I do not know"
    for wrong in (f"It is {answer}", "<answer>no</answer>", "", thought):
        found = scored(environment, problem, wrong)
        assert found["score"] == 0.0
        assert found["answered"] == float(wrong == "<answer>no</answer>")
    assert scored(made(answer="text"), problem, f" {answer}\n")["score"] == 1.0


def test_tasks_follow_from_number_and_seed_in_another_environment() -> None:
    """Also in chunks that training never reaches, and after the problem went through JSON."""
    for number in (0, 499, 500, 2**40 + 7):
        first, second = made().problem(number, seed=1), made().problem(number, seed=1)
        assert first == second
        moved = bundles.EnvironmentProblem(messages=first.messages, data=json.loads(json.dumps(dict(first.data))))
        assert scored(made(), moved, first.data["answer"])["score"] == 1.0
    questions = {made().problem(n, seed=s).data["question"] for n in range(20) for s in range(20)}
    assert len(questions) > 80, "seeds and numbers that add up to the same are different problems"


def test_several_data_sets_are_mixed_by_their_weights() -> None:
    environment = made(dataset=["chain_sum", "leg_counting"], weights=[3.0, 1.0], config={"chain_sum": EASY})
    names = [environment.problem(n, seed=0).data["dataset"] for n in range(200)]
    assert 0.6 < names.count("chain_sum") / 200 < 0.9
    problem = next(t for t in (environment.problem(n, 0) for n in range(50)) if t.data["dataset"] == "leg_counting")
    assert scored(environment, problem, problem.data["answer"])["score"] == 1.0


def test_an_answer_that_cannot_be_scored_is_wrong_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = made()
    dataset = environment._of("chain_sum", 0, 0)
    for result in (ValueError("no"), float("nan"), None):

        def score(*_: Any, result: Any = result) -> Any:
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(type(dataset), "score_answer", score)
        found = scored(environment, environment.problem(0, 0), "<answer>1</answer>")
        assert found == {"score": 0.0, "answered": 1.0, "failed": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": ["chain_sums"]}, r"no data set 'chain_sums'.* Fix: chain_sum"),
        ({"dataset": ["chain_sum", "chain_sum"]}, "named twice"),
        ({"weights": [1.0, 2.0]}, "2 weights for 1 data sets"),
        ({"config": {"terms": 3}}, r"chain_sum of reasoning-gym refuses its parameters: .*terms"),
        ({"config": {"min_terms": 5, "max_terms": 2}}, "refuses its parameters"),
        ({"config": {"seed": 3}}, "seed of chain_sum is set by the run"),
        ({"dataset": ["chain_sum", "leg_counting"], "config": {"min_terms": 2}}, "min_terms is no data set"),
    ],
)
def test_wrong_options_are_one_clear_message(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(**changes)
