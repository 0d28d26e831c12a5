"""A process that has one environment and its episodes; `pool.py` starts it and asks it.

It reads requests from one pipe and writes an answer to each into another: ``{"ok": …}`` or ``{"fault": [reason,
line]}``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from surogate_core.plugin import SurogateError, bundles
from surogate_core.service.app import die_with
from surogate_reinforcement import shapes
from surogate_reinforcement.frames import GoneError, Pipe, TooLargeError, packed
from surogate_reinforcement.limits import ProcessLimits, allow_cpu
from surogate_reinforcement.shapes import InvalidError

_OURS = ("surogate_core", "surogate_reinforcement")
_LINE = 300
"""Characters of a fault's line."""


def main(arguments: list[str]) -> int:
    """Serve requests until the pipe ends. `arguments`: descriptors to read and to write, the guardian's process."""
    reading, writing, parent = map(int, arguments)
    for end in (reading, writing):
        os.set_inheritable(end, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends its workers.
    pipe, process = Pipe(reading, writing), os.getpid()
    given = pipe.receive()
    sys.path[:] = given["path"]
    limits = ProcessLimits(**given["limits"])
    die_with(parent)
    served = ServedEnvironment(given)
    with contextlib.suppress(GoneError):
        while True:
            request = pipe.receive()
            limits.count()
            if request["do"] != "build":
                allow_cpu(2 * given["timeout"])
            answer = _answer(served, request)
            if os.getpid() != process:
                os._exit(1)  # A fork of the environment's must not answer too.
            pipe.send(answer)
    return 0


def _answer(served: ServedEnvironment, request: Mapping[str, Any]) -> bytes:
    number = request["number"]
    try:
        return packed({"ok": getattr(served, request["do"])(**request["with"]), "number": number})
    except InvalidError as error:
        reason, line = "invalid", str(error)
    except SurogateError as error:
        reason, line = "refused" if request["do"] == "build" else "exception", str(error)
    except MemoryError:
        reason, line = "memory", ""
    except TooLargeError as error:
        reason, line = "size", str(error)
    except BaseException as error:
        reason, line = "exception", ": ".join(filter(None, (type(error).__name__, _text(error))))
        place = _place(error.__traceback__)
        line = " ".join(line[: 4 * _LINE].split())[: _LINE - len(place)] + place
    return packed({"fault": [reason, " ".join(line[: 4 * _LINE].split())[:_LINE]], "number": number})


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def _place(traceback: TracebackType | None) -> str:
    """Module and line of the innermost call that is neither Python's own nor ours, in brackets; empty without one."""
    found = ""
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if module and module.partition(".")[0] not in {*_OURS, *sys.stdlib_module_names}:
            found = f" ({module[-_LINE // 3 :]} line {traceback.tb_lineno})"
        traceback = traceback.tb_next
    return found


class ServedEnvironment:
    """The environment of a worker; its public methods are the requests."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._environment: bundles.Environment
        self._episodes: dict[int, bundles.Episode] = {}

    def build(self) -> dict[str, Any]:
        """Import the plugin that offers the environment, and no other, and build it."""
        from surogate_core.plugin import ConfigError, Problem, load_plugins
        from surogate_core.service.config import Builder
        from surogate_core.service.plugins import ImportPolicy, LockRule

        asked = self._given["policy"]
        policy = ImportPolicy(
            block=asked["block"],
            allow=tuple((where, frozenset(names)) for where, names in asked["allow"]),
            locks=tuple(LockRule(**rule) for rule in asked["locks"]),
        )
        spec = load_plugins(policy).get("environment", self._given["name"])
        builder = Builder(lambda key: "", lambda key, known: Problem(key=key, message="there is no such option."))
        options = builder.dataclass(spec.options, self._given["options"], "environment.")
        if builder.problems:
            raise ConfigError(builder.problems)
        self._environment = spec.build(options)
        size, held_out = self._environment.size, getattr(self._environment, "held_out", 0)
        groups = hasattr(self._environment, "group_rewards")
        return shapes.facts({"size": size, "held_out": held_out, "groups": groups})

    def problem(self, number: int, seed: int) -> dict[str, Any]:
        problem = self._environment.problem(number, seed)
        if not isinstance(problem, bundles.EnvironmentProblem):
            raise InvalidError(f"problem returned {type(problem).__name__}, not an EnvironmentProblem")
        values = {"messages": list(problem.messages), "data": dict(problem.data), "tools": list(problem.tools)}
        return _json(shapes.problem(values), "the problem")

    def start(self, episode: int, problem: Mapping[str, Any]) -> None:
        messages, tools = tuple(problem["messages"]), tuple(problem["tools"])
        started = self._environment.start(
            bundles.EnvironmentProblem(messages=messages, data=problem["data"], tools=tools)
        )
        self._episodes[episode] = started

    def reply(self, episode: int, text: str) -> dict[str, Any]:
        turn = self._episodes[episode].reply(text)
        if not isinstance(turn, bundles.Turn):
            raise InvalidError(f"reply returned {type(turn).__name__}, not a Turn")
        return _json(shapes.turn({"messages": list(turn.messages), "done": bool(turn.done)}), "the turn")

    def rewards(self, episode: int) -> dict[str, float | None]:
        return shapes.rewards(self._episodes[episode].rewards())

    def group(self, episodes: list[int]) -> list[dict[str, float | None]]:
        found = self._environment.group_rewards([self._episodes[e] for e in episodes])  # type: ignore[attr-defined]
        if not isinstance(found, list | tuple) or len(found) != len(episodes):
            raise InvalidError(f"group_rewards returned no list of {len(episodes)} rewards")
        return shapes.group(found)

    def forget(self, episodes: list[int]) -> None:
        for episode in episodes:
            self._episodes.pop(episode, None)


def _json(value: dict[str, Any], what: str) -> dict[str, Any]:
    """The value; raises `InvalidError` unless it is JSON."""
    try:
        packed(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidError(f"{what} has values that JSON has not: {error}") from error
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
