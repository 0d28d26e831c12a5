"""Tasksets of verifiers 0.4: tasks of one turn whose rewards read the trace alone."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping
from itertools import islice
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

from surogate_core.plugin import UserError, bundles
from surogate_environment_verifiers.options import VerifiersOptions
from surogate_reinforcement.episodes import OneReply


class Tasks:
    """The tasks of a taskset."""

    def __init__(self, tasks: list[Any]) -> None:
        self._tasks = tasks
        self.size = len(tasks)

    def problem(self, number: int, seed: int) -> bundles.EnvironmentProblem:
        messages = tuple({"role": m.role, "content": m.content} for m in _messages(self._tasks[number]))
        return bundles.EnvironmentProblem(messages=messages, data={"number": number})

    def start(self, problem: bundles.EnvironmentProblem) -> bundles.Episode:
        return OneReply(problem, self._judged)

    def _judged(self, problem: bundles.EnvironmentProblem, reply: str) -> Mapping[str, float | None]:
        found = self._tasks[int(problem.data["number"])]
        trace = _trace(found, reply)
        asyncio.run(found.score(trace))
        return {name: None if one is None else float(one.value) for name, one in trace.rewards.items()}


def open_taskset(module: ModuleType, options: VerifiersOptions) -> Tasks:
    """The taskset that a module exports. Raises `UserError` for one that needs more than a reply."""
    names = getattr(module, "__all__", [])
    classes = [c for c in (getattr(module, n, None) for n in names) if inspect.isclass(c)]
    tasksets: list[Any] = [c for c in classes if issubclass(c, vf.Taskset) and c is not vf.Taskset]
    if len(tasksets) != 1:
        raise UserError(
            f"environment.module: {options.module} exports {len(tasksets)} tasksets in __all__. "
            "Fix: name a module with one Taskset, or with load_environment"
        )
    if any(issubclass(c, vf.Env) for c in classes):
        raise _unsupported(options, "has an Env of its own", "name a taskset that SingleAgentEnv can run")
    config = _config_type(tasksets[0])(id=options.module, **options.args)
    taskset = tasksets[0](config)
    tasks = list(islice(taskset, options.tasks)) if taskset.INFINITE else list(taskset)
    if not tasks:
        raise UserError(f"environment.module: the taskset of {options.module} has no task.")
    if taskset.toolsets(config):
        raise _unsupported(options, "has tool servers", "name one without, or write an environment of your own")
    _check_task(tasks[0], options)
    return Tasks(tasks)


def _check_task(task: Any, options: VerifiersOptions) -> None:
    kind = type(task)
    needs = "name one whose rewards read the trace alone, or write an environment of your own"
    if kind.NEEDS_CONTAINER or any(getattr(kind, h) is not getattr(vf.Task, h) for h in ("setup", "finalize")):
        raise _unsupported(options, "prepares a sandbox for each task", needs)
    if kind.toolsets(task.config):
        raise _unsupported(options, "has tool servers", needs)
    if task.plugged_judges():
        raise _unsupported(options, "is judged by a model", needs)
    for reward in task.hooks("reward"):
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            raise _unsupported(options, f"has the reward {reward.__name__}, which reads a sandbox", needs)
    if not task.hooks("reward"):
        raise _unsupported(options, "has no reward", needs)
    if task.data.prompt is None:
        raise _unsupported(options, "lets a simulated user begin", needs)


def _config_type(taskset: Any) -> Any:
    """The configuration that a taskset is declared with."""
    from verifiers.v1.utils.generic import concrete_type

    return concrete_type(taskset, vf.TasksetConfig) or vf.TasksetConfig


def _messages(task: Any) -> Iterator[Any]:
    data = task.data
    if data.system_prompt:
        yield SystemMessage(content=data.system_prompt)
    if isinstance(data.prompt, str):
        yield UserMessage(content=data.prompt)
    else:
        yield from data.prompt


def _trace(task: Any, reply: str) -> Any:
    """The trace of a rollout with one reply."""
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace = vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig()))
    parent: int | None = None
    for message in (*_messages(task), AssistantMessage(content=reply)):
        trace.nodes.append(MessageNode(parent=parent, message=message, sampled=isinstance(message, AssistantMessage)))
        parent = len(trace.nodes) - 1
    trace.is_completed = trace.ok = True
    return trace


def _unsupported(options: VerifiersOptions, what: str, fix: str) -> UserError:
    return UserError(
        f"environment.module: the taskset of {options.module} {what}, which a run does not have. Fix: {fix}"
    )
