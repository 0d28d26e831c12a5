"""Sums, differences and products of a few numbers."""

from __future__ import annotations

from surogate_core.plugin import UserError, bundles
from surogate_environments.expressions import evaluate, shown
from surogate_environments.options import ArithmeticOptions
from surogate_reinforcement.answers import answer_of, same_answer
from surogate_reinforcement.draws import Draws
from surogate_reinforcement.episodes import OneReply, user_says


def question_of(draws: Draws, *, digits: int, terms: int, operators: str) -> str:
    """A question such as ``12 + 7 - 3``."""
    parts = [str(draws.below(10**digits))]
    for _ in range(terms - 1):
        parts += [draws.choice(operators), str(draws.below(10**digits))]
    return " ".join(parts)


def correct(problem: bundles.EnvironmentProblem, text: str) -> bundles.Rewards:
    """1 for the right answer."""
    return {"correct": float(same_answer(answer_of(text), problem.data["answer"]))}


class Arithmetic:
    """Questions without an end."""

    size = None

    def __init__(self, options: ArithmeticOptions) -> None:
        if wrong := sorted(set(options.operators) - set("+-*")):
            raise UserError(f"environment.operators: {wrong[0]!r} is not available. Fix: a text of + - *, such as '+-'")
        self._options = options

    def problem(self, number: int, seed: int) -> bundles.EnvironmentProblem:
        options, draws = self._options, Draws(seed, number)
        while True:
            question = question_of(draws, digits=options.digits, terms=options.terms, operators=options.operators)
            answer = evaluate(question)
            if options.negative or answer >= 0:
                break
        text = options.prompt.replace("{question}", question)
        return bundles.EnvironmentProblem(messages=user_says(text), data={"answer": shown(answer)})

    def start(self, problem: bundles.EnvironmentProblem) -> bundles.Episode:
        return OneReply(problem, correct)
