"""A number to reach with an expression of given numbers."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from surogate_core.plugin import bundles
from surogate_environments.expressions import ExpressionError, evaluate, numbers_of
from surogate_environments.options import CountdownOptions
from surogate_reinforcement.answers import tagged, visible
from surogate_reinforcement.draws import Draws
from surogate_reinforcement.episodes import OneReply, user_says


class Countdown:
    """Problems without an end; every one of them has a solution."""

    size = None

    def __init__(self, options: CountdownOptions) -> None:
        self._options = options

    def problem(self, number: int, seed: int) -> bundles.EnvironmentProblem:
        options, draws = self._options, Draws(seed, number)
        while True:
            numbers = [draws.between(1, options.largest) for _ in range(options.numbers)]
            solution, target = _combined(draws, numbers)
            if target.denominator == 1 and 0 < target <= 10 * options.largest and target not in numbers:
                break
        values = draws.shuffled(numbers)
        text = options.prompt.replace("{numbers}", ", ".join(map(str, values))).replace("{target}", str(target))
        data = {"numbers": values, "target": int(target), "answer": f"<answer>{solution}</answer>"}
        return bundles.EnvironmentProblem(messages=user_says(text), data=data)

    def start(self, problem: bundles.EnvironmentProblem) -> bundles.Episode:
        return OneReply(problem, _judged)


def _combined(draws: Draws, numbers: list[int]) -> tuple[str, Fraction]:
    """A random expression of all numbers, and its value."""
    parts = [(str(number), Fraction(number)) for number in numbers]
    while len(parts) > 1:
        (left, a), (right, b), *rest = draws.shuffled(parts)
        operator = draws.choice("+-*/" if b else "+-*")
        value = {"+": a + b, "-": a - b, "*": a * b}.get(operator)
        parts = [(f"({left} {operator} {right})", a / b if value is None else value), *rest]
    text, value = parts[0]
    return text[1:-1], value


def _judged(problem: bundles.EnvironmentProblem, text: str) -> bundles.Rewards:
    expression = tagged(visible(text))
    if expression is None:
        return {"correct": 0.0, "valid": 0.0}
    try:
        used, value = Counter(numbers_of(expression)), evaluate(expression)
    except ExpressionError:
        return {"correct": 0.0, "valid": 0.0}
    valid = not used - Counter(problem.data["numbers"])
    return {"correct": float(valid and value == problem.data["target"]), "valid": float(valid)}
