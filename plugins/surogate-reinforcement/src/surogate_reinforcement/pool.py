"""The worker processes of an environment: its problems, and episodes that are played in them.

The code of an environment is slow, hangs, or fails now and then, and none of it may end a run. So it runs in processes
with limits, each request has a time limit, and what goes wrong is a `Fault` in the place of the answer. The other
episodes of a process that was killed are played again from their replies, the next time that they are asked.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from threading import Thread
from typing import Any, TypeVar

from surogate_core.plugin import UserError, bundles
from surogate_core.service.config import plain
from surogate_core.service.plugins import Registry, whole
from surogate_reinforcement.process import BUILD_LATE, BUILD_SECONDS, REFUSED, WorkerProcess

Key = Hashable
T = TypeVar("T")

MEMORY = 4 << 30
"""Bytes of memory that a worker process may use, and each process that it starts."""
PROCESSES = 64
"""Processes and threads that a worker may have."""
FILE_SIZE = 256 << 20
"""Bytes of a file that a worker may write."""
SOON = 0.5
"""The first fault is reported within this many seconds."""


@dataclass(slots=True)
class _Episode:
    number: int
    worker: int
    problem: dict[str, Any]
    group: Key
    life: int = 0
    """The worker's life in which the episode is there; 0: in none."""
    replies: list[str] = field(default_factory=list)
    fault: bundles.Fault | None = None


class EnvironmentPool:
    """Worker processes that have one environment each. Close it, or use it in a `with` statement."""

    def __init__(
        self,
        environment: bundles.ChosenBundle,
        registry: bundles.Plugins,
        *,
        workers: int = 1,
        timeout: float = 10.0,
        build_timeout: float = BUILD_SECONDS,
        build_option: str = "--build-timeout",
        memory: int = MEMORY,
        processes: int = PROCESSES,
        waits: bool = True,
        stopped: Callable[[], bool] = lambda: False,
        first_fault: Callable[[bundles.Fault], None] = lambda fault: None,
    ) -> None:
        """`environment`: the choice of the configuration. `timeout`: seconds of one problem, reply or reward.
        `build_timeout`: seconds to build the environment, and `build_option` is what a user sets it with. `waits`:
        whether to return when it is built; otherwise what needs it waits. `stopped`: whether to ask for nothing more;
        problems, replies and rewards then raise `Stopped`. `first_fault` is called once, soon after the first fault of
        all, by the thread that waits for the answers.

        Whoever waits gets a `UserError` if the environment cannot be built.
        """
        self._stopped, self._first_fault = stopped, first_fault
        self._fault: bundles.Fault | None = None
        """The first fault of all."""
        self._told = False
        known = whole(Registry, registry)
        offered = known.bundles("environment")[environment.name]
        self.name = environment.name
        self.spec = offered.bundle
        given = {
            "path": sys.path,
            "name": environment.name,
            "options": plain(environment.options) if environment.options is not None else {},
            "timeout": timeout,
            "limits": {"memory": memory, "processes": processes, "file_size": FILE_SIZE},
            "policy": _policy_of_workers(known, offered.plugin.name),
        }
        self._workers = [WorkerProcess(given, timeout, build_timeout) for _ in range(max(1, workers))]
        self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="environment")
        self._episodes: dict[Key, _Episode] = {}
        self._started = 0
        weakref.finalize(self, _close_all, self._workers)
        self._plugin, self._build_option = offered.plugin.name, build_option
        self._workers[0].begin()
        self._built: Future[Mapping[str, Any]] = Future()
        # No thread of a pool: Python would wait for it at its end, and an environment may take minutes.
        Thread(target=self._build, name="environment building", daemon=True).start()
        if waits:
            self._built.result()

    def _build(self) -> None:
        try:
            self._built.set_result(self._facts())
        except BaseException as error:
            self._built.set_exception(error)

    def _facts(self) -> Mapping[str, Any]:
        """The facts of the environment, once the first worker has it. `UserError` if it cannot be built."""
        facts = self._workers[0].build()
        if isinstance(facts, bundles.Fault):
            _close_all(self._workers)
            detail = facts.detail
            if facts.reason != REFUSED:
                fix = f"its options, or the code of plugin {self._plugin}"
                fix = f"a larger {self._build_option}, or {fix}" if facts.detail.startswith(BUILD_LATE) else fix
                detail = f"it cannot be built: {facts}. Fix: {fix}"
            raise UserError(f"environment={self.name}: {detail}")
        # After the first, which may have filled a cache on disk that all read. They are ready when they are asked.
        for worker in self._workers[1:]:
            worker.begin()
        found: Mapping[str, Any] = facts
        return found

    @property
    def size(self) -> int | None:
        """Number of problems to train on, or None if there is no end of them."""
        size: int | None = self._built.result()["size"]
        return size

    @property
    def held_out(self) -> int:
        """Number of problems after those, which training never draws."""
        return int(self._built.result()["held_out"])

    @property
    def _has_groups(self) -> bool:
        return bool(self._built.result()["groups"])

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers."""
        if not self._built.done():
            # Whoever waits for it reads from its pipe, and has to hear that it is gone before that is closed.
            self._workers[0].kill()
            wait([self._built])
        _close_all(self._workers)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ----------------------------------------------------------------------------- problems

    def problems(self, numbers: Sequence[int], seed: int) -> list[bundles.EnvironmentProblem | bundles.Fault]:
        """The problems of these numbers, in their order."""

        def one(place: int) -> bundles.EnvironmentProblem | bundles.Fault:
            found = self._request(place % len(self._workers), "problem", number=numbers[place], seed=seed)
            if isinstance(found, bundles.Fault):
                return found
            return bundles.EnvironmentProblem(
                messages=tuple(found["messages"]), data=found["data"], tools=tuple(found["tools"])
            )

        return self._spread(range(len(numbers)), lambda place: place % len(self._workers), one)

    # ---------------------------------------------------------------------------- episodes

    def start(self, episodes: Sequence[tuple[Key, bundles.EnvironmentProblem]], *, groups: Sequence[Key] = ()) -> None:
        """Begin episodes, under keys of the caller's that are not in use.

        `groups`: a key for each episode; equal ones are attempts at one problem, which `rewards` compares where the
        environment has `group_rewards`. The environment hears of an episode with its first reply.
        """
        workers = {e.group: e.worker for e in self._episodes.values()} if self._has_groups else {}
        for place, (key, problem) in enumerate(episodes):
            assert key not in self._episodes, key
            group = groups[place] if groups and self._has_groups else key
            self._started += 1
            worker = workers.get(group, self._started % len(self._workers))
            if self._has_groups:
                workers[group] = worker
            plain = {
                "messages": list(problem.messages),
                "data": dict(problem.data),
                "tools": list(problem.tools),
            }
            self._episodes[key] = _Episode(number=self._started, worker=worker, problem=plain, group=group)

    def reply(self, replies: Sequence[tuple[Key, str]]) -> list[bundles.Turn | bundles.Fault]:
        """The environment's answer to each reply, in their order."""

        def one(given: tuple[Key, str]) -> bundles.Turn | bundles.Fault:
            episode = self._episodes[given[0]]
            found = self._present(episode)
            if found is None:
                found = self._ask(episode, "reply", text=given[1])
            episode.replies.append(given[1])
            return (
                found
                if isinstance(found, bundles.Fault)
                else bundles.Turn(messages=tuple(found["messages"]), done=found["done"])
            )

        return self._spread(replies, lambda given: self._episodes[given[0]].worker, one)

    def rewards(self, keys: Sequence[Key]) -> list[bundles.Rewards | bundles.Fault]:
        """The named rewards of episodes, in their order; this ends them.

        Episodes of one group are compared if they are in one call.
        """
        groups: dict[Key, list[_Episode]] = {}
        for key in keys:
            episode = self._episodes[key]
            groups.setdefault(episode.group, []).append(episode)
        found: dict[int, bundles.Rewards | bundles.Fault] = {}
        for part in self._spread(list(groups.values()), lambda group: group[0].worker, self._group_rewards):
            found |= part
        ended = [self._episodes[key].number for key in keys]
        self.forget(keys)
        return [found[number] for number in ended]

    def forget(self, keys: Iterable[Key]) -> None:
        """End episodes without their rewards."""
        ended = [self._episodes.pop(key) for key in keys]

        def one(place: int) -> None:
            worker = self._workers[place]
            present = [e.number for e in ended if e.worker == place and e.life == worker.life()]
            if present:
                worker.ask("forget", episodes=present)

        self._spread(range(len(self._workers)), lambda place: place, one)

    def _group_rewards(self, group: Sequence[_Episode]) -> dict[int, bundles.Rewards | bundles.Fault]:
        found: dict[int, bundles.Rewards | bundles.Fault] = {}
        for episode in group:
            found[episode.number] = self._present(episode) or self._ask(episode, "rewards")
        sound = [episode for episode in group if not isinstance(found[episode.number], bundles.Fault)]
        if not self._has_groups or not sound:
            return found
        absent = [self._present(episode) for episode in sound]  # a fault of one may have ended the process of all
        fault = next((fault for fault in absent if fault is not None), None)
        compared = fault or self._request(sound[0].worker, "group", episodes=[e.number for e in sound])
        if not isinstance(compared, bundles.Fault) and len(compared) != len(sound):
            compared = bundles.Fault(
                reason="invalid", detail=f"there are {len(compared)} rewards of {len(sound)} episodes"
            )
        for place, episode in enumerate(sound):
            before = found[episode.number]
            assert not isinstance(before, bundles.Fault)
            found[episode.number] = compared if isinstance(compared, bundles.Fault) else {**before, **compared[place]}
        return found

    # ------------------------------------------------------------------------------ details

    def _present(self, episode: _Episode) -> bundles.Fault | None:
        """Play an episode again whose process was killed; the fault that it has, or has now, or None."""
        worker = self._workers[episode.worker]
        if episode.fault is None and episode.life != worker.life():
            self._ask(episode, "start", problem=episode.problem)
            episode.life = worker.life()  # after a fault it does not matter
            for text in episode.replies:
                if episode.fault is None:
                    self._ask(episode, "reply", text=text)
        return episode.fault

    def _ask(self, episode: _Episode, do: str, **arguments: Any) -> Any:
        found = self._request(episode.worker, do, episode=episode.number, **arguments)
        if isinstance(found, bundles.Fault):
            episode.fault = found
        return found

    def _request(self, worker: int, do: str, **arguments: Any) -> Any:
        found = self._workers[worker].ask(do, **arguments)
        if isinstance(found, bundles.Fault) and self._fault is None:
            self._fault = found
        return found

    def _spread(self, items: Sequence[Any], worker_of: Callable[[Any], int], one: Callable[[Any], T]) -> list[T]:
        """The results of all items in their order; each worker does its own, one after the other."""
        self._built.result()
        parts: dict[int, list[int]] = {}
        for place, item in enumerate(items):
            parts.setdefault(worker_of(item), []).append(place)
        results: dict[int, T] = {}

        def work(places: list[int]) -> None:
            for place in places:
                if self._stopped():
                    raise bundles.Stopped
                results[place] = one(items[place])
                if len(parts) == 1:
                    self._tell()

        if len(parts) == 1:
            work(*parts.values())
        else:
            submitted = [self._threads.submit(work, places) for places in parts.values()]
            going = set(submitted)
            while going:
                _, going = wait(going, SOON)
                self._tell()
            for done in submitted:
                done.result()
        return [results[place] for place in range(len(items))]

    def _tell(self) -> None:
        if self._fault is not None and not self._told:
            self._told = True
            self._first_fault(self._fault)


def _policy_of_workers(registry: Registry, plugin: str) -> dict[str, Any]:
    """The plugin policy of the worker processes, which need one plugin alone, as JSON values."""
    policy = registry.policy
    allowed = [[where, sorted(names)] for where, names in policy.allow]
    return {
        "block": dict(policy.block),
        "allow": [*allowed, ["a worker process of an environment", [plugin]]],
        "locks": [asdict(rule) for rule in policy.locks],
    }


def _close_all(workers: Sequence[WorkerProcess]) -> None:
    for worker in workers:
        worker.close()
