"""Word problems of a data set, such as GSM8K."""

from __future__ import annotations

from typing import Any

from surogate_core.plugin import RowError, UserError, bundles, encoding, is_hub_id
from surogate_environments.arithmetic import correct
from surogate_environments.options import ProblemsOptions
from surogate_reinforcement.answers import marked
from surogate_reinforcement.episodes import OneReply, user_says


class Problems:
    """One problem for each row; held-out ones follow."""

    def __init__(self, options: ProblemsOptions) -> None:
        if not options.path:
            raise UserError("environment.path is not set. Fix: environment.path=problems.jsonl")
        self._options = options
        self._problems = self._read(options.path, options.split)
        self.size = len(self._problems) - options.held_out
        self.held_out = options.held_out
        if options.eval_path or options.eval_split:
            self._add_held_out(options)
        if self.size < 1:
            raise UserError(f"environment.held_out: {options.path} has {len(self._problems)} problems. Fix: fewer")

    def _add_held_out(self, options: ProblemsOptions) -> None:
        if options.held_out:
            raise UserError("environment.held_out: eval_path or eval_split is set too. Fix: keep one of them")
        held_out = self._read(options.eval_path or options.path, options.eval_split or options.split)
        if held_out == self._problems:
            raise UserError(f"environment.eval_path: {options.eval_path} has the problems of environment.path again.")
        self.held_out = len(held_out)
        self._problems += held_out

    def _read(self, path: str, split: str) -> list[tuple[str, str]]:
        options, found = self._options, []
        spec = encoding.SourceSpec(path=path, split=split, subset=options.subset if is_hub_id(path) else None)
        for place, row in encoding.open_source(spec).rows():
            if isinstance(row, RowError):
                raise UserError(f"{place}: {row}")
            question, answer = _text(row, options.question, place), _text(row, options.answer, place)
            found.append((question, marked(answer) or answer.strip()))
        if not found:
            raise UserError(f"environment.path: {path} has no problem. Fix: one object a line")
        return found

    def problem(self, number: int, seed: int) -> bundles.EnvironmentProblem:
        question, answer = self._problems[number]
        system = ({"role": "system", "content": self._options.system},) if self._options.system else ()
        messages = (*system, *user_says(self._options.prompt.replace("{question}", question)))
        return bundles.EnvironmentProblem(messages=messages, data={"answer": answer})

    def start(self, problem: bundles.EnvironmentProblem) -> bundles.Episode:
        return OneReply(problem, correct)


def _text(row: Any, field: str, place: str) -> str:
    value = row.get(field) if isinstance(row, dict) else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{place}: the field {field!r} has no text. Fix: correct the line, or name the field")
    return value
