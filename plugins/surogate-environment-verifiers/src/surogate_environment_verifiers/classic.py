"""Environments of verifiers 0.1: `load_environment` returns one that asks a client for the model's replies.

The client here waits until the run has the reply. Environment and episodes share an event loop that only runs while an
episode is asked for something, so nothing happens between two calls.
"""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import verifiers as vf

from surogate_core.plugin import UserError, bundles
from surogate_environment_verifiers.calls import calls_of
from surogate_environment_verifiers.options import VerifiersOptions

MODEL = "policy"
"""The model's name for the environment."""


class Waiting(vf.Client):
    """A client whose answers come from the run."""

    def __init__(self) -> None:
        self.prompt: list[Any] = []
        """The messages of the question that waits."""
        self.asked: asyncio.Event = asyncio.Event()
        self._answer: asyncio.Future[str] | None = None
        self._replies = 0

    async def get_response(self, prompt: Any, model: str, *arguments: Any, **others: Any) -> Any:
        """The model's reply to a conversation, once there is one."""
        if self._answer is not None:
            raise RuntimeError("the environment asks the model twice at a time, which a run cannot answer")
        self.prompt = list(prompt)
        self._answer = asyncio.get_running_loop().create_future()
        self.asked.set()
        try:
            text = await self._answer
        finally:
            self._answer = None
        self._replies += 1
        content, calls = calls_of(text)
        tools = [
            vf.ToolCall(id=f"call_{self._replies}_{place}", name=name, arguments=arguments)
            for place, (name, arguments) in enumerate(calls)
        ]
        message = vf.types.ResponseMessage(
            content=content,
            tool_calls=tools or None,
            finish_reason="tool_calls" if tools else "stop",
            is_truncated=False,
        )
        return vf.Response(id=f"reply-{self._replies}", created=0, model=MODEL, message=message)

    def answer(self, text: str) -> None:
        """Give the environment the reply that it waits for."""
        assert self._answer is not None
        self.asked.clear()
        self._answer.set_result(text)

    def end(self) -> None:
        """Tell the environment that there is no room for a further reply."""
        assert self._answer is not None
        self.asked.clear()
        self._answer.set_exception(vf.OverlongPromptError("the run has no room for a further reply"))


# Its abstract methods talk to an API, which this one does not have.
Waiting.__abstractmethods__ = frozenset()


class ClassicEpisode:
    """A rollout of the environment, which waits for replies."""

    def __init__(self, owner: Classic, problem: bundles.EnvironmentProblem) -> None:
        self._owner, self._client = owner, Waiting()
        self.state: Any = None
        """What the environment keeps of the rollout; None until it is over."""
        rollout = owner.env.rollout(
            input=dict(problem.data["row"]), client=self._client, model=MODEL, sampling_args={"n": 1}
        )
        self._rollout = owner.loop.create_task(rollout)
        self._advance()
        if self.state is None and [plain(m) for m in self._client.prompt] != [dict(m) for m in problem.messages]:
            raise RuntimeError("the environment changes its prompt when an episode begins, which a run cannot follow")

    def reply(self, text: str) -> bundles.Turn:
        if self.state is not None:
            return bundles.Turn(done=True)
        before = [plain(message) for message in self._client.prompt]
        self._client.answer(text)
        self._advance()
        if self.state is not None:
            return bundles.Turn(done=True)
        now = [plain(message) for message in self._client.prompt]
        added = now[len(before) + 1 :]
        if now[: len(before)] != before or not added:
            raise RuntimeError("the environment rewrites the conversation, which a run cannot follow")
        return bundles.Turn(messages=tuple(added), done=False)

    def rewards(self) -> Mapping[str, float | None]:
        return {} if self._owner.together else self._owner.scored([self])[0]

    def ended(self) -> Any:
        """The rollout's state. Raises what went wrong in it."""
        if self.state is None:
            self._client.end()
            self._advance()
        if self.state is None:
            raise RuntimeError("the environment goes on although there is no room for a further reply")
        if self.state.get("error") is not None:
            raise RuntimeError(f"the environment failed: {self.state['error']!r}")
        return self.state

    def _advance(self) -> None:
        """Run the environment until it asks the model or is done."""
        loop = self._owner.loop

        async def until_it_waits() -> None:
            asked = loop.create_task(self._client.asked.wait())
            await asyncio.wait({self._rollout, asked}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()

        loop.run_until_complete(until_it_waits())
        if self._rollout.done():
            self.state = self._rollout.result()

    def __del__(self) -> None:
        with suppress(Exception):
            if not self._rollout.done():
                self._rollout.cancel()
                self._owner.loop.run_until_complete(asyncio.wait({self._rollout}))


class Classic:
    """One problem for each row of the environment's data; held-out ones follow."""

    together = False
    """Whether rewards compare the attempts at one problem."""

    def __init__(self, env: Any) -> None:
        self.env, self.loop = env, asyncio.new_event_loop()
        rows = _rows(env.get_dataset())
        held_out = _rows(env.build_eval_dataset() or [])
        self.size, self.held_out = len(rows), len(held_out)
        self._data = [*rows, *held_out]
        self._weights = _weights(env.rubric)

    def problem(self, number: int, seed: int) -> bundles.EnvironmentProblem:
        row = self._data[number]
        info = row.get("info")
        info = json.loads(info) if isinstance(info, str) and info else info or {}
        tools = info.get("tool_defs") or self.env.tool_defs or []
        return bundles.EnvironmentProblem(
            messages=tuple(row["prompt"]), data={"row": row}, tools=tuple(_function(tool) for tool in tools)
        )

    def start(self, problem: bundles.EnvironmentProblem) -> ClassicEpisode:
        return ClassicEpisode(self, problem)

    def scored(self, attempts: Sequence[ClassicEpisode]) -> list[Mapping[str, float | None]]:
        """The rewards of attempts at one problem, multiplied by their weights."""
        states = [attempt.ended() for attempt in attempts]
        with _errors() as said:
            self.loop.run_until_complete(self.env.rubric.score_group(states))
        if said and all(state["trajectory"] for state in states):
            # verifiers takes 0 for a reward whose function fails; a run counts it and leaves the episode out. A
            # function may well fail where there is no reply to judge.
            raise RuntimeError(said[0])
        if self._weights is None:
            return [{"reward": float(state["reward"])} for state in states]
        weights = self._weights
        return [{name: weight * float(state["metrics"][name]) for name, weight in weights.items()} for state in states]


class ComparedRollouts(Classic):
    """The same, with a rubric that compares the attempts at one problem."""

    together = True

    def group_rewards(self, episodes: Sequence[ClassicEpisode]) -> list[Mapping[str, float | None]]:
        """The rewards of all attempts at one problem."""
        return self.scored(episodes)


def open_environment(make: Callable[..., Any], options: VerifiersOptions) -> Classic:
    """The environment that a module's `load_environment` makes. Raises `UserError` for one that a run cannot use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        env = make(**options.args)
    if not isinstance(env, vf.MultiTurnEnv):
        raise UserError(
            f"environment.module: {options.module} makes a {type(env).__name__}. "
            "Fix: name an environment with turns, a SingleTurnEnv, MultiTurnEnv or ToolEnv"
        )
    if any(isinstance(rubric, vf.JudgeRubric) for rubric in _rubrics(env.rubric)):
        raise UserError(
            f"environment.module: {options.module} is judged by a model behind an API (JudgeRubric), which a run does "
            "not have. Fix: give it a rubric of functions"
        )
    together = any(r._is_group_func(f) for r in _rubrics(env.rubric) for f in r.funcs)
    return ComparedRollouts(env) if together else Classic(env)


def plain(message: Any) -> dict[str, Any]:
    """A message as a chat template takes it."""
    value = message.model_dump() if hasattr(message, "model_dump") else dict(message)
    found = {key: item for key, item in value.items() if item is not None}
    found.setdefault("content", "")
    found.pop("tool_call_id", None)
    content = found["content"]
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        found["content"] = "".join(part["text"] for part in content)
    return found


def _rows(dataset: Any) -> list[dict[str, Any]]:
    """The rows as JSON values; a table has None where a message lacks a field."""
    found = []
    for row in dataset:
        value = json.loads(json.dumps(dict(row), default=str))
        prompt = value.get("prompt")
        value["prompt"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(plain, prompt))
        found.append(value)
    return found


def _function(tool: Any) -> dict[str, Any]:
    value = tool.model_dump() if hasattr(tool, "model_dump") else dict(tool)
    return {"type": "function", "function": {key: value[key] for key in ("name", "description", "parameters")}}


def _rubrics(rubric: Any) -> list[Any]:
    below = [inner for one in getattr(rubric, "rubrics", []) for inner in _rubrics(one)]
    return [rubric, *below]


def _weights(rubric: Any) -> dict[str, float] | None:
    """Name of each reward that counts → its weight; None if names are used twice or a rubric has its own way."""
    pairs = list(zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=True))
    names = [name for name, _ in pairs]
    usual = {vf.Rubric.score_group, vf.RubricGroup.score_group}
    if len(set(names)) < len(names) or any(type(one).score_group not in usual for one in _rubrics(rubric)):
        return None
    return {name: float(weight) for name, weight in pairs if weight} or None


@contextmanager
def _errors() -> Any:
    """The messages of reward functions that fail while it is open."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                said.append(" ".join(record.getMessage().split()))

    logger, handler = logging.getLogger("verifiers"), Handler()
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
