"""Arithmetic with a calculator that the model may call before it answers."""

from __future__ import annotations

import json
import re

from surogate_core.plugin import bundles
from surogate_environments.arithmetic import correct, question_of
from surogate_environments.expressions import ExpressionError, evaluate, shown
from surogate_environments.options import CalculatorOptions
from surogate_reinforcement.answers import visible
from surogate_reinforcement.draws import Draws
from surogate_reinforcement.episodes import user_says

_HOW = (
    "\n\nYou can use a calculator: write <calculator>EXPRESSION</calculator>, for example "
    "<calculator>12 * (3 + 4)</calculator>, and the next message has the result. Then answer with the number alone."
)
_TAG = re.compile(r"<calculator>([^<]*)</calculator>")
_CALL = re.compile(r"<tool_call>([^<]*)</tool_call>")
_TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of an arithmetic expression of numbers, + - * / and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "The expression, such as 12 * (3 + 4)."}},
            "required": ["expression"],
        },
    },
}


class Calculator:
    """Questions without an end, too hard for the head."""

    size = None

    def __init__(self, options: CalculatorOptions) -> None:
        self._options = options

    def problem(self, number: int, seed: int) -> bundles.EnvironmentProblem:
        options = self._options
        question = question_of(Draws(seed, number), digits=options.digits, terms=options.terms, operators="+-*")
        text = options.prompt.replace("{question}", question)
        has_tags = options.call == "tag"
        return bundles.EnvironmentProblem(
            messages=user_says(text + _HOW if has_tags else text),
            data={"answer": shown(evaluate(question))},
            tools=() if has_tags else (_TOOL,),
        )

    def start(self, problem: bundles.EnvironmentProblem) -> bundles.Episode:
        return _Attempt(problem, self._options)


class _Attempt:
    def __init__(self, problem: bundles.EnvironmentProblem, options: CalculatorOptions) -> None:
        self._problem, self._options = problem, options
        self._turns, self._calls, self._last = 0, 0, ""

    def reply(self, text: str) -> bundles.Turn:
        self._turns += 1
        self._last = visible(text)
        asked = self._asked()
        if asked is None or self._turns >= self._options.max_turns:
            return bundles.Turn(done=True)
        self._calls += 1
        try:
            result = shown(evaluate(asked))
        except ExpressionError as error:
            result = f"Error: {error}."
        role = "user" if self._options.call == "tag" else "tool"
        return bundles.Turn(messages=({"role": role, "content": result},), done=False)

    def rewards(self) -> bundles.Rewards:
        answered = "" if self._asked() is not None else self._last
        return {**correct(self._problem, answered), "calls": float(self._calls)}

    def _asked(self) -> str | None:
        """The expression of the last call in the last reply, or None."""
        if self._options.call == "tag":
            found = _TAG.findall(self._last)
            return found[-1] if found else None
        calls = _CALL.findall(self._last)
        if not calls:
            return None
        try:
            arguments = json.loads(calls[-1])["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            return str(arguments["expression"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return ""
