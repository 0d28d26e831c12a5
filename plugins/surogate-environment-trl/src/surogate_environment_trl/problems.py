"""Prompts with columns, and rewards by functions as TRL calls them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surogate_core.plugin import UserError, bundles, encoding, import_policy, load_function
from surogate_environment_trl.options import RewardFunctionOptions
from surogate_reinforcement.episodes import user_says

Function = Callable[..., Any]
NOT_HERE = ("completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL passes and an environment does not have: it sees texts, not the trainer."""


class JudgedCompletion:
    """One completion, which functions judge when it is there."""

    def __init__(
        self, problem: bundles.EnvironmentProblem, judge: Callable[[JudgedCompletion], Mapping[str, float | None]]
    ) -> None:
        self.problem, self.text = problem, ""
        self._judge = judge

    def reply(self, text: str) -> bundles.Turn:
        self.text = text
        return bundles.Turn(done=True)

    def rewards(self) -> Mapping[str, float | None]:
        return self._judge(self)


class Rewarded:
    """One problem for each line of the file; held-out ones follow."""

    def __init__(self, options: RewardFunctionOptions, functions: Mapping[str, Function]) -> None:
        self._options, self._functions = options, functions
        rows = _rows(options, "path", options.path)
        self.size = len(rows)
        held_out = _rows(options, "eval_path", options.eval_path) if options.eval_path else []
        self.held_out = len(held_out)
        self._rows = [*rows, *held_out]

    def problem(self, number: int, seed: int) -> bundles.EnvironmentProblem:
        row = self._rows[number]
        prompt = row[self._options.prompt]
        messages = user_says(prompt) if isinstance(prompt, str) else tuple(prompt)
        if self._options.system and messages[0].get("role") != "system":
            messages = ({"role": "system", "content": self._options.system}, *messages)
        return bundles.EnvironmentProblem(messages=messages, data={"row": row})

    def start(self, problem: bundles.EnvironmentProblem) -> bundles.Episode:
        return JudgedCompletion(problem, lambda episode: self._rewards([episode])[0])

    def _rewards(self, episodes: Sequence[JudgedCompletion]) -> list[dict[str, float | None]]:
        """By the name of their function, in the order of the episodes, which have the same columns."""
        columns = self._arguments(episodes)
        found: list[dict[str, float | None]] = [{} for _ in episodes]
        for name, function in self._functions.items():
            values = function(**columns)
            if inspect.iscoroutine(values):
                values = asyncio.run(values)
            listed = list(values) if not isinstance(values, str | Mapping) else []
            if len(listed) != len(episodes):
                raise ValueError(f"{name} returned {len(listed)} rewards for {len(episodes)} completions")
            for rewards, value in zip(found, listed, strict=True):
                rewards[name] = None if value is None else float(value)
        return found

    def _arguments(self, episodes: Sequence[JudgedCompletion]) -> dict[str, list[Any]]:
        """`prompts`, `completions` and the columns as lists; completions are conversations where prompts are."""
        rows = [episode.problem.data["row"] for episode in episodes]
        own = self._options.prompt
        columns = {name: [row.get(name) for row in rows] for name in rows[0] if name not in (own, "prompt")}
        prompts = [row[own] for row in rows]
        said: list[Any] = [episode.text for episode in episodes]
        if not isinstance(prompts[0], str):
            said = [[{"role": "assistant", "content": text}] for text in said]
        return {**columns, "prompts": prompts, "completions": said}


class RewardedTogether(Rewarded):
    """The same, with functions that are called with all completions of a prompt."""

    def start(self, problem: bundles.EnvironmentProblem) -> bundles.Episode:
        return JudgedCompletion(problem, lambda episode: {})

    def group_rewards(self, episodes: Sequence[JudgedCompletion]) -> list[dict[str, float | None]]:
        """The rewards of all completions of one prompt."""
        return self._rewards(episodes)


def build(options: RewardFunctionOptions) -> Rewarded:
    """The environment. Raises `UserError` for a file, a row or a function that is wrong."""
    if not options.path:
        raise UserError("environment.path is not set. Fix: environment.path=prompts.jsonl")
    if options.reward_funcs is None:
        raise UserError(
            "environment.reward_funcs is not set. Fix: environment.reward_funcs=[rewards.py:FUNCTION], or [] where a "
            "reward_model alone judges"
        )
    functions: dict[str, Function] = {}
    for text in options.reward_funcs:
        function = load_function(text, key="environment.reward_funcs", policy=import_policy())
        name = getattr(function, "__name__", text.rpartition(":")[2])
        if name in functions:
            raise UserError(f"environment.reward_funcs: two functions have the name {name}. Fix: rename one")
        functions[name] = function
    made = (RewardedTogether if options.call == "group" else Rewarded)(options, functions)
    for name, function in functions.items():
        _check_arguments(name, function, made._rows[0].keys())
    return made


def _check_arguments(name: str, function: Function, columns: Any) -> None:
    """Every argument without a default must be there, and others must be accepted."""
    parameters = inspect.signature(function).parameters.values()
    known = {"prompts", "completions", *columns}
    for one in parameters:
        if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) or one.default is not one.empty or one.name in known:
            continue
        if one.name in NOT_HERE:
            raise UserError(
                f"environment.reward_funcs: {name} wants {one.name}, which an environment does not have. "
                "Fix: judge the texts, or write an environment of your own"
            )
        raise UserError(
            f"environment.reward_funcs: {name} wants {one.name}, and the file has the columns {', '.join(columns)}."
        )
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        missing = sorted(known - {one.name for one in parameters} - {"prompt"})
        if missing:
            raise UserError(
                f"environment.reward_funcs: {name} does not accept {missing[0]}. Fix: add **kwargs, as TRL asks for"
            )


def _rows(options: RewardFunctionOptions, key: str, path: str) -> list[Mapping[str, Any]]:
    found = []
    for place, row in encoding.read_rows(path, key=f"environment.{key}"):
        prompt = row.get(options.prompt) if isinstance(row, Mapping) else None
        if not (prompt and (isinstance(prompt, str) or _is_conversation(prompt))):
            raise UserError(
                f"{place}: the column {options.prompt!r} has no text and no messages. "
                "Fix: correct the line, or name the column with environment.prompt"
            )
        found.append(row)
    if not found:
        raise UserError(f"environment.{key} {path}: has no prompt. Fix: one object a line")
    return found


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in value
    )
